"""What a reader has to know of a row besides its figures: `warnings` of results.json, in words."""

from collections.abc import Mapping
from typing import Any

from quantmill.devices.listeners import DISTURBANCE
from quantmill.report import repetition
from quantmill.report.labels import label

LARGE_LOSS = 1.5  # times the reference's perplexity
LOOPS = "falls into a loop"


def all_of(row: Mapping[str, Any], reference: str, tokens: str | None = None) -> list[str]:
    """The warnings of a row, the gravest first.

    `reference`: the format whose default run all others are related to. `tokens`: how others read the model's texts
    otherwise (tokens.tokenize_texts).
    """
    about_losses = (
        *prompts_warning(row["versions"]),
        *products_warnings(row["versions"]),
        loss_warning(row, reference),
        loop_warning(row, reference),
    )
    about_origin = (origin_warning(row), gate_warning(row), tokens, experts_warning(row))
    found = (*about_origin, disturbance_warning(row["versions"]), *about_losses)
    return [text for text in found if text]


def for_verdict(row: Mapping[str, Any]) -> list[str]:
    """Those that the choice of a format depends on: not loops that the reference falls into after the same prompts."""
    habit = row["degenerate"] and not repetition.own_loops(row["degenerate"])
    return [text for text in row["warnings"] if not (habit and text.startswith(LOOPS))]


def origin_warning(row: Mapping[str, Any]) -> str | None:
    """That somebody else built the artifact."""
    return "not built here: somebody else's artifact" if row["prebuilt"] else None


def unchecked(row: Mapping[str, Any]) -> str | None:
    """Why the gate could not compare the artifact with its own weights; None where it did. Such a row is ranked
    nowhere: its engine may calculate another model."""
    gate = (row["artifact"] or {}).get("gate") or {}
    return (gate.get("faithful") or {}).get("unchecked")


def gate_warning(row: Mapping[str, Any]) -> str | None:
    """That nobody compared the artifact with the weights that it was made from."""
    reason = unchecked(row)
    return f"not checked against its own weights: {reason}" if reason else None


def experts_warning(row: Mapping[str, Any]) -> str | None:
    """That no text told a tool how to round some of a mixture's experts, or that nobody knows."""
    found = (row["artifact"] or {}).get("experts") or {}
    if "unknown" in found:
        return f"whether its calibration text reached every expert is unknown: {found['unknown']}"
    names = found.get("unreached")
    if not names:
        return None
    return f"its calibration text never reached {len(names)} of {found['count']} experts, the first {names[0]}"


def disturbance_warning(versions: Mapping[str, str] | None) -> str | None:
    """That nobody knows what disturbed the row: its server's processes cannot be told from others."""
    return (versions or {}).get(DISTURBANCE)


def products_warnings(versions: Mapping[str, str] | None) -> list[str]:
    """That a row's processor loses more than its format does, or is slower: an engine says so with its versions."""
    ends = dict.fromkeys(("int8", "int4"), "elsewhere the same artifact loses less")
    ends["float16"] = "dtype: bfloat16 may be several times as fast"
    found = {kind: (versions or {}).get(f"{kind} products") for kind in ends}
    return [f"its {kind} products {said}: {ends[kind]}" for kind, said in found.items() if said]


def prompts_warning(versions: Mapping[str, str] | None) -> list[str]:
    """That a server read texts, and did not tell as how many tokens."""
    untold = "prompts' ids" in (versions or {})
    return ["its server does not tell as how many tokens it reads a prompt's text"] if untold else []


def loss_warning(row: Mapping[str, Any], reference: str) -> str | None:
    """That a row's perplexity is far from the reference's."""
    ratio = row["perplexity_ratio"]
    if not ratio or ratio["ratio"] <= LARGE_LOSS:
        return None
    return f"a large loss: its perplexity is {ratio['ratio']:.3g} times {reference}'s"


def loop_warning(row: Mapping[str, Any], reference: str) -> str | None:
    """That texts of a row repeat themselves to their end, and whether the reference's do so too."""
    found = row["degenerate"]
    if not found or not found["prompts"]:
        return None
    first = f"from token {found['first_token']} on" + (" at the earliest" if found["prompts"] > 1 else "")
    said = f"{LOOPS} after {found['prompts']} of {found['of']} prompts, {first}"
    if label(row) == reference:
        return f"{said}; decoded greedily, many small models do"
    too = [loop["reference_too"] for loop in found["loops"]]
    if None in too:
        return said
    if all(too):
        return f"{said}; {reference} does after the same prompt{'s' if len(too) > 1 else ''}: the model's own habit"
    return f"{said}; {reference} does after {sum(too) or 'none'} of these"
