"""What a study found, for a terminal: a verdict for each model, and the table, in about a dozen lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantmill.common.program import printable
from quantmill.report import caveats
from quantmill.report.labels import label
from quantmill.report.numbers import MISSING, number, size

BUDGET = 0.01  # of perplexity over the reference's, as the page's slider begins
LINES = 8  # rows of the table, and verdicts; the page has all
HEADINGS = ("", "tokens/s", "perplexity", "KL, nats", "bits/weight", "size", "")
Row = Mapping[str, Any]


def is_tie(row: Row) -> bool:
    """Whether a row's quality cannot be told from the reference's."""
    return row["above_noise_floor"] is False or row["perplexity_ratio"]["tie"]


def loss(row: Row, reference: str) -> str:
    """What a row loses, in words."""
    if label(row) == reference:
        return "the reference"
    if is_tie(row):
        return "no loss that can be told from noise"
    return f"perplexity {row['perplexity_ratio']['ratio'] - 1:+.1%}"


def fastest(rows: Sequence[Row]) -> list[Row]:
    """The rows than which none is faster beyond the intervals; first the one to name, on the front if one is."""
    best = max(row["tokens_per_second_low"] for row in rows)
    group = [row for row in rows if row["tokens_per_second_high"] >= best]
    first = max(group, key=lambda row: (row["pareto"] is not False, row["tokens_per_second"]))
    return [first, *(row for row in group if row is not first)]


def verdict(rows: Sequence[Row], reference: str) -> str:
    """The fastest of one model's rows that loses at most `BUDGET`, as far as it can be told."""
    measured = [row for row in rows if row["tokens_per_second"] is not None]
    if not measured:
        return "nothing was measured; the page says why"
    checked = [row for row in measured if not caveats.unchecked(row)]
    if not checked:
        return "nothing that was measured was checked against its own weights, so none is called the fastest"
    quiet = [row for row in checked if not row["interference"]]
    if not quiet:
        return "every measurement of speed was disturbed, so none is called the fastest"
    if len({row["device"] for row in quiet}) > 1:
        return "measured on several devices; the page compares those of each"
    scored = [row for row in quiet if row["perplexity_ratio"]]
    allowed = [row for row in scored if is_tie(row) or row["perplexity_ratio"]["ratio"] <= 1 + BUDGET]
    if scored and not allowed:
        return f"nothing undisturbed loses at most {BUDGET:.0%}"
    first, *others = fastest(allowed or quiet)
    equals = [label(row) for row in others]
    limit = f"at no more than {BUDGET:.0%} loss" if scored else "with an unknown loss"
    beside = f" (as fast, as far as can be told: {', '.join(equals)})" if equals else ""
    what = f"; {loss(first, reference)}" if scored else ""
    return f"fastest {limit}: {label(first)}, {number(first['tokens_per_second'], 3)} tokens/s{what}{beside}"


def over_reference(row: Row, reference: str) -> str:
    """Perplexity, and how far it is above the reference's."""
    ratio = row["perplexity_ratio"]
    if ratio is None or label(row) == reference:
        return number(row["perplexity"])
    return f"{number(row['perplexity'])} ({round(ratio['ratio'] - 1, 3) + 0.0:+.1%})"  # no -0.0


def mark(row: Row) -> str:
    """Why a row is not ranked, in a word."""
    if row["interference"]:
        return "disturbed"
    return MISSING if row["tokens_per_second"] is None else "unchecked" if caveats.unchecked(row) else ""


def table(rows: Sequence[Row], reference: str) -> list[str]:
    """Aligned lines: names to the left, figures to the right."""
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
    widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < place < len(widths) - 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (HEADINGS, *lines)
    ]


def text(results: Mapping[str, Any], page: str) -> str:
    """Verdicts, table, and the path of the page.

    Args:
        results: the content of results.json. page: the path.
    """
    rows, reference = results["rows"], results["config"]["reference"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    verdicts = [f"{model}: {verdict([row for row in rows if row['model'] == model], reference)}" for model in models]
    shown = table(rows[:LINES], reference)
    left = [f"and {len(rows) - LINES} more rows: see the page"] if len(rows) > LINES else []
    lines = [*verdicts[:LINES], "", *shown, *left, "", f"The report: {page}"]
    return "\n".join(printable(line) for line in lines)
