"""Facts that a reader has to know besides a row's figures: `warnings` of results.json, in words."""

from collections.abc import Mapping, Sequence

from quantmill.devices.listeners import DISTURBANCE
from quantmill.report.labels import label
from quantmill.report.rows import Row

LARGE_LOSS = 1.5  # times the reference's perplexity
LOOPS = "falls into a loop after"


def all_of(row: Row, reference: str, tokens: str | None = None) -> list[str]:
    """Return the warnings of a row, the gravest first.

    `reference`: the format whose default run all others are related to. `tokens`: how others read the model's texts
    differently (tokens.tokenize_texts).
    """
    versions, reason = row["versions"] or {}, unchecked(row)
    found = (
        "not built here: another publisher's artifact" if row["prebuilt"] else None,
        f"not checked against its own weights: {reason}" if reason else None,
        tokens,
        experts_warning(row),
        versions.get(DISTURBANCE),  # of a server whose processes cannot be distinguished from others
        "its server does not report the number of a prompt's tokens" if "prompts' ids" in versions else None,
        *products_warnings(versions),
        loss_warning(row, reference),
        loop_warning(row, reference),
    )
    return [text for text in found if text]


def unchecked(row: Row) -> str | None:
    """Return why the gate could not compare the artifact with its own weights; None if it did. Such a row is ranked
    nowhere: its engine may calculate another model."""
    gate = (row["artifact"] or {}).get("gate") or {}
    return (gate.get("faithful") or {}).get("unchecked")


def experts_warning(row: Row) -> str | None:
    """Warn of a mixture's experts that no calibration text reached, or of which this is not known."""
    found = (row["artifact"] or {}).get("experts") or {}
    if found.get("all_tokens"):  # its tool showed them to each expert
        return None
    if "unknown" in found:
        return f"whether its calibration text reached every expert is unknown: {found['unknown']}"
    names = found.get("unreached")
    if not names:
        return None
    return f"its calibration text never reached {len(names)} of {found['count']} experts, the first {names[0]}"


def products_warnings(versions: Mapping[str, str]) -> list[str]:
    """Warn of a processor that loses more than the format does, or is slower; engines report it with their versions."""
    ends = dict.fromkeys(("int8", "int4"), "elsewhere the same artifact loses less")
    ends["float16"] = "dtype: bfloat16 may be several times as fast"
    found = {kind: versions.get(f"{kind} products") for kind in ends}
    return [f"its {kind} products {said}: {ends[kind]}" for kind, said in found.items() if said]


def loss_warning(row: Row, reference: str) -> str | None:
    """Warn of a perplexity far from the reference's."""
    ratio = row["perplexity_ratio"]
    if not ratio or ratio["ratio"] <= LARGE_LOSS:
        return None
    return f"a large loss: its perplexity is {ratio['ratio']:.3g} times {reference}'s"


def loop_warning(row: Row, reference: str) -> str | None:
    """Warn of a row whose texts repeat themselves to their end more often than the reference's do: beyond the interval
    of the difference, or with nothing to compare with."""
    found = row["degenerate"]
    if not found or not found["prompts"] or label(row) == reference:
        return None
    said = f"{LOOPS} {found['prompts']} of {found['of']} prompts"
    theirs = found["reference"]
    if theirs is None:
        return f"{said}; there is no {reference} to compare with"
    if theirs["difference_low"] <= 0:
        return None
    ends = f"{theirs['difference_low']:+.0%} to {theirs['difference_high']:+.0%}"
    return f"{said}, {reference} after {theirs['prompts']} (95% interval of the difference {ends})"


def low_bits(rows: Sequence[Row]) -> list[str]:
    """Return a line for each model that its author published in low bits: that is the reference of its rows."""
    found = {}
    for row in rows:
        said = ((row["artifact"] or {}).get("source") or {}).get("decoded")
        if isinstance(said, dict) and not row["prebuilt"]:
            found[row["model"]] = said
    return [
        f"{model} was published in {said.get('weights')} ({said.get('layout')}). The reference is that model, decoded "
        f"to {said.get('dtype')}. Formats with a similar grid lose less of it than of weights that were never rounded."
        for model, said in found.items()
    ]


def habits(rows: Sequence[Row], reference: str) -> list[str]:
    """Return a line for each model whose reference falls into loops: that is no fault of a format."""
    return [
        f"A habit of {row['model']}: decoded greedily, {reference} {LOOPS} {found['prompts']} of {found['of']} prompts."
        " A format is marked only if it does so significantly more often."
        for row in rows
        if label(row) == reference and (found := row["degenerate"]) and found["prompts"]
    ]
