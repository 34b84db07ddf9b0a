"""Rows as tables of Markdown, for READMEs and model cards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantmill.common.program import UserError
from quantmill.report.column import Column
from quantmill.report.columns import shown_columns
from quantmill.report.labels import label, mode_label
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.numbers import MISSING, number, size

SHORT = ("model", "format", "runs in", "tokens/s (95%)", "perplexity", "over the reference (95%, paired)", "size")
SHARES = ("bandwidth_fraction", "client_cpu_fraction")  # figures that are shown as such and may be more than 1
HEADING = ("new_tokens", "processes", "repeats")  # what the line above a table says of all its rows


def ratio_to_reference(row: Mapping[str, Any], reference: str) -> str:
    """Perplexity over the reference's, with its paired interval."""
    ratio = row["perplexity_ratio"]
    if ratio is None:
        return MISSING
    if label(row) == reference:
        return "the reference"
    if row["above_noise_floor"] is False:  # no further than the reference is from itself in another arithmetic
        return "within the noise"
    return "a tie" if ratio["tie"] else interval(ratio["ratio"], ratio["low"], ratio["high"], digits=5)


def interval(value: float, low: float, high: float, digits: int = 3) -> str:
    """A figure and its 95% interval."""
    return f"{number(value, digits)} ({number(low, digits)} to {number(high, digits)})"


def runs_in(row: Mapping[str, Any]) -> str:
    """Engine, arithmetic, how a token was decoded or by how many threads, and on how many cards."""
    threads = row["threads"] and f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    cards = f"{row['gpus']} GPUs" if row["gpus"] > 1 else None
    return ", ".join(filter(None, (row["engine"], row["compute_type"], threads or mode_label(row["mode"]), cards)))


def batches(row: Mapping[str, Any]) -> dict[str, str]:
    """Heading -> tokens a second of several sequences that were decoded together."""
    measured = [each for each in row["batches"] or [] if each.get("batch", 1) > 1 and "tokens_per_second" in each]
    return {f"{each['batch']} at once, tokens/s": number(each["tokens_per_second"], 3) for each in measured}


def other_modes(row: Mapping[str, Any]) -> str:
    """Tokens a second in the ways that are not the row's own; what its tokens disqualify is in brackets."""
    ways = row["other_modes"] or ()
    figures = [(way, f"{mode_label(way['mode'])} {number(way['tokens_per_second'], 3)}") for way in ways]
    return "; ".join(f"[{figure}]" if way["refused"] else figure for way, figure in figures) or MISSING


def speed(row: Mapping[str, Any]) -> str:
    """Tokens a second with their interval, and whether something disturbed them; a dash where none was measured."""
    if row["tokens_per_second"] is None:
        return MISSING
    figures = (row[f"tokens_per_second{end}"] for end in ("", "_low", "_high"))
    return interval(*figures) + (", disturbed" if row["interference"] else "")


def cell(column: Column, value: Any) -> str:
    """A figure as text."""
    if value is None or isinstance(value, str):
        return value or MISSING
    if column.kind == "boolean":
        return "yes" if value else "no"
    if column.kind == "number" and (column.limits.get("maximum") == 1 or column.name in SHARES):
        return f"{number(value * 100, 3)}%"
    return size(value) if column.unit == "B" else number(value, 3)


def cells(row: Mapping[str, Any], reference: str) -> dict[str, str]:
    """A row of the table: heading -> cell. Some columns say more than their figure."""
    cuda = (row["device_details"] or {}).get("device") == "cuda"  # a CPU's caches hold what its memory would have to
    fraction = row["bandwidth_fraction"]  # None of an engine that does not tell what it reads
    more = {
        "format": {"format": f"`{label(row)}`"},
        "run": {},  # the label says it
        "engine": {"runs in": runs_in(row)},
        "tokens_per_second": {"tokens/s (95%)": speed(row), "other modes": other_modes(row)},
        "perplexity": {"perplexity": number(row["perplexity"])},
        "nll_difference": {"over the reference (95%, paired)": ratio_to_reference(row, reference)},
        "bandwidth_fraction": {"of the bandwidth": MISSING if fraction is None or not cuda else f"{fraction:.0%}"},
    }
    found: dict[str, str] = {}
    for column in shown_columns():
        found |= batches(row) if column.name == "perplexity" else {}
        found |= more.get(column.name, {column.heading: cell(column, row[column.name])})
    return found


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *rows)]


def table(results: Mapping[str, Any], short: bool = False) -> str:
    """The Markdown between the markers: what was measured, on what, and the rows; empty columns are left out.

    `short` keeps the columns of `SHORT` alone.
    """
    timed = [row for row in results["rows"] if row["protocol"]["latency"]]
    if not timed:
        raise UserError("results.json: the speed of no row was measured")
    latency, quality = timed[0]["protocol"]["latency"], timed[0]["protocol"]["quality"]
    # a row on several cards says so
    device = timed[0]["device"].rpartition(" x ")[2]
    measured = {
        (row["device"].rpartition(" x ")[2], *(row["protocol"]["latency"][name] for name in HEADING)) for row in timed
    }
    if len(measured) > 1:
        raise UserError("results.json: rows of several devices or protocols make no table")
    processes, repeats = latency["processes"], latency["repeats"]
    protocol = (
        f"On {device}, batch 1, {latency['new_tokens']} new tokens after each prompt, "
        f"{processes} process{'es' if processes > 1 else ''} of {repeats} repeat{'s' if repeats > 1 else ''}"
    )
    if quality:
        protocol += (
            f"; perplexity by `{quality['perplexity']}` over {quality['windows']} windows of {quality['window']} tokens"
        )
    rows = [cells(row, results["config"]["reference"]) for row in results["rows"]]
    asked = SHORT if short else tuple(max(rows, key=len))
    headings = [heading for heading in asked if any(row.get(heading, MISSING) != MISSING for row in rows)]
    if len({row["model"] for row in rows}) == 1:
        headings.remove("model")
    shown = lines(headings, ([row.get(heading, MISSING) for heading in headings] for row in rows))
    loads = [] if short else load_lines(results.get("loads", ()))
    return "\n".join([f"{protocol}.", "", *shown, *loads])


def load_lines(loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of servers under load, and in words how many figures are refused."""
    good = [row for row in loads if row["load"] and not row["refused"]]
    shown = sorted((column for column in LOAD_COLUMNS if column.shown), key=lambda column: column.shown or 0)
    shown = [column for column in shown if any(row[column.name] is not None for row in good)]
    rows = [[cell(column, row[column.name]) for column in shown] for row in good]
    table = ["", *lines([column.heading for column in shown], rows)] if good else []
    refused = [row["refused"] for row in loads if row["refused"]]
    if refused:
        table += ["", f"Of {len(loads)} loads, the figures of {len(refused)} are refused; of the first: {refused[0]}."]
    return table
