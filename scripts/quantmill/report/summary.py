"""Findings of a study for a terminal: a verdict for each model, and the table, in about a dozen lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmill.common.program import printable
from quantmill.report import caveats, deployed, memory
from quantmill.report.labels import label
from quantmill.report.numbers import MISSING, align, number, size
from quantmill.report.rows import Results, Row

BUDGET = 0.01  # of perplexity over the reference's, as the page's slider begins
LINES = 8  # rows of the table, and verdicts; the page has all
HEADINGS = ("", "tokens/s", "perplexity", "KL, nats", "bits/weight", "size", "")


def is_tie(row: Row) -> bool:
    """Return whether a row's quality cannot be distinguished from the reference's."""
    return row["above_noise_floor"] is False or bool(row["perplexity_ratio"] and row["perplexity_ratio"]["tie"])


def loss(row: Row, reference: str) -> str:
    """Describe what a row loses."""
    if label(row) == reference:
        return "the reference"
    if is_tie(row) or row["perplexity_ratio"] is None:
        return "no loss beyond the noise"
    return f"perplexity {row['perplexity_ratio']['ratio'] - 1:+.1%}"


def speed(row: Row) -> tuple[float, float, float]:
    """Return a row's deployed speed with its ends, as the page's verdict compares it."""
    return deployed.speed(row) or (0.0, 0.0, 0.0)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that none is faster than beyond the intervals; first the one to name, on the front if one is."""
    best = max(speed(row)[1] for row in rows)
    group = [row for row in rows if speed(row)[2] >= best]
    first = max(group, key=lambda row: (row["pareto"] is True, not row["interference"], speed(row)[0]))
    return [first, *(row for row in group if row is not first)]


def verdict(rows: Sequence[Row], reference: str, asked: Mapping[str, Any] | None = None) -> str:
    """Name the fastest of one model's rows that loses at most `BUDGET`, as far as it is known, and fits the memory.

    `asked`: the config's memory_at.
    """
    measured = [row for row in rows if row["tokens_per_second"] is not None]
    if not measured:
        return "nothing was measured; the page says why"
    checked = [row for row in measured if not caveats.unchecked(row)]
    if not checked:
        return "nothing that was measured was checked against its own weights, so none is called the fastest"
    fitting = [row for row in checked if memory.fits(row, asked)]
    if asked and not fitting:
        return f"nothing that was measured is known to fit {asked['budget_gb']:g} GB with {memory.words(asked)}"
    ranked = [row for row in fitting if deployed.speed(row)]
    if not ranked:
        return "every speed is Quantmill's own, which no deployment has, so none is called the fastest"
    if all(row["interference"] for row in ranked):
        return "every measurement of speed was disturbed, so none is called the fastest"
    if len({row["device"] for row in ranked}) > 1:
        return "measured on several devices; the page compares those of each"
    scored = [(row, ratio) for row in ranked if (ratio := row["perplexity_ratio"])]
    allowed = [row for row, ratio in scored if is_tie(row) or ratio["ratio"] <= 1 + BUDGET]
    if scored and not allowed:
        return f"nothing loses at most {BUDGET:.0%}"
    compared = allowed or ranked
    if all(row["interference"] for row in compared):
        return f"every speed at no more than {BUDGET:.0%} loss was disturbed, so none is called the fastest"
    first, *others = fastest(compared)
    open_ = [label(row) for row in compared if row["interference"] and row not in (first, *others)]
    limit = f"at no more than {BUDGET:.0%} loss" if scored else "with an unknown loss"
    equals = f" (as fast, as far as can be told: {', '.join(map(label, others))})" if others else ""
    unsure = f" (disturbed, perhaps faster: {', '.join(open_)})" if open_ else ""
    what = f"; {loss(first, reference)}" if scored else ""
    if asked and (needed := memory.total(first, asked)) is not None:
        room = f"fits {asked['budget_gb']:g} GB: " if "budget_gb" in asked else ""
        what += f"; {room}{size(needed)} with {memory.words(asked)}"
    rate, low, _ = speed(first)
    said = f"at least {number(low, 3)}" if first["interference"] else number(rate, 3)
    return f"fastest {limit}: {label(first)}, {said} tokens/s{what}{equals}{unsure}"


def over_reference(row: Row, reference: str) -> str:
    """Return the perplexity, and how far it is above the reference's."""
    ratio = row["perplexity_ratio"]
    if ratio is None or label(row) == reference:
        return number(row["perplexity"])
    return f"{number(row['perplexity'])} ({round(ratio['ratio'] - 1, 3) + 0.0:+.1%})"  # no -0.0


def mark(row: Row) -> str:
    """Qualify a row's speed in a word."""
    if row["interference"]:
        return "disturbed"
    if row["tokens_per_second"] is not None and not deployed.speed(row):
        return "Quantmill's own speed"
    return MISSING if row["tokens_per_second"] is None else "unchecked" if caveats.unchecked(row) else ""


def table(rows: Sequence[Row], reference: str) -> list[str]:
    """Return aligned lines: names to the left, figures to the right."""
    several = len({row["model"] for row in rows}) > 1
    lines = [
        (
            f"{row['model']}: {label(row)}" if several else label(row),
            number(row["tokens_per_second"], 3),
            over_reference(row, reference),
            number(row["kld_mean"], 3),
            number(row["bits_per_weight"], 3),
            size(row["size_bytes"]),
            mark(row),
        )
        for row in rows
    ]
    return align([HEADINGS, *lines], right=range(1, len(HEADINGS) - 1))


def text(results: Results, page: str) -> str:
    """Return verdicts, table, and the path of the page.

    Args:
        results: the content of results.json. page: the path.
    """
    rows, reference = results["rows"], results["config"]["reference"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    asked = results["config"].get("memory_at")
    of_models = {model: [row for row in rows if row["model"] == model] for model in models}
    verdicts = [f"{model}: {verdict(found, reference, asked)}" for model, found in of_models.items()]
    shown = table(rows[:LINES], reference)
    left = [f"and {len(rows) - LINES} more rows: see the page"] if len(rows) > LINES else []
    lines = [*verdicts[:LINES], "", *shown, *left, "", f"The report: {page}"]
    return "\n".join(printable(line) for line in lines)
