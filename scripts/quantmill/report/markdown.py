"""Tables of rows in Markdown, for READMEs and model cards."""

from collections.abc import Iterable, Sequence
from typing import Any

from quantmill.common.program import UserError
from quantmill.report import memory
from quantmill.report.column import Column
from quantmill.report.columns import shown_columns
from quantmill.report.labels import label, mode_label
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.numbers import MISSING, number, size
from quantmill.report.rows import Load, Mode, Results, Row, value_of

SHORT = ("model", "format", "runs in", "tokens/s (95%)", "perplexity", "over the reference (95%, paired)", "size")
SHARES = ("bandwidth_fraction", "client_cpu_fraction")  # figures that are shown as such and may exceed 1
HEADING = ("new_tokens", "processes", "repeats")  # what the line above a table says of all its rows
DEPLOYED, SAME = "tokens/s, deployed (95%)", "the same"


def ratio_to_reference(row: Row, reference: str) -> str:
    """Format the perplexity over the reference's, with its paired interval."""
    ratio = row["perplexity_ratio"]
    if ratio is None:
        return MISSING
    if label(row) == reference:
        return "the reference"
    if row["above_noise_floor"] is False:  # no further than the reference is from itself in another arithmetic
        return "within the noise"
    return "a tie" if ratio["tie"] else interval(ratio["ratio"], ratio["low"], ratio["high"], digits=5)


def interval(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """Format a figure and its 95% interval."""
    return f"{number(value, digits)} ({number(low, digits)} to {number(high, digits)})"


def runs_in(row: Row) -> str:
    """Describe a row's engine, arithmetic, threads or way to decode, and number of GPUs."""
    threads = row["threads"] and f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    cards = f"{row['gpus']} GPUs" if row["gpus"] > 1 else None
    return ", ".join(filter(None, (row["engine"], row["compute_type"], threads or mode_label(row["mode"]), cards)))


def batches(row: Row) -> dict[str, str]:
    """Map headings to tokens a second of several sequences that were decoded together."""
    measured = [each for each in row["batches"] or [] if each.get("batch", 1) > 1 and "tokens_per_second" in each]
    return {f"{each['batch']} at once, tokens/s": number(each["tokens_per_second"], 3) for each in measured}


def other_modes(row: Row) -> str:
    """Format the tokens a second of the other ways to decode; refused ones are in brackets."""
    ways: Sequence[Mode] = row["other_modes"] or ()
    figures = [(way, f"{mode_label(way['mode'])} {number(way['tokens_per_second'], 3)}") for way in ways]
    return "; ".join(f"[{figure}]" if way["refused"] else figure for way, figure in figures) or MISSING


def speed(row: Row, name: str) -> str:
    """Format tokens a second with their interval, and whether they were disturbed; a dash if not measured."""
    value, low, high = (value_of(row, f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return MISSING
    return interval(value, low, high) + (", disturbed" if row["interference"] else "")


def cell(column: Column, value: Any) -> str:
    """Format a figure."""
    if value is None or isinstance(value, str):
        return value or MISSING
    if column.kind == "boolean":
        return "yes" if value else "no"
    if column.kind == "number" and (column.limits.get("maximum") == 1 or column.name in SHARES):
        return f"{number(value * 100, 3)}%"
    return size(value) if column.unit == "B" else number(value, 3)


def cells(row: Row, reference: str) -> dict[str, str]:
    """Map the headings of a row of the table to its cells. Some columns say more than their figure."""
    cuda = (row["device_details"] or {}).get("device") == "cuda"  # a CPU's caches hold what its memory would have to
    same = row["deployed_tokens_per_second"] == row["tokens_per_second"] is not None
    fraction = row["bandwidth_fraction"]  # None of an engine that does not report what it reads
    more: dict[str, dict[str, str]] = {
        "format": {"format": f"`{label(row)}`"},
        "run": {},  # the label says it
        "engine": {"runs in": runs_in(row)},
        "tokens_per_second": {"tokens/s (95%)": speed(row, "tokens_per_second"), "other modes": other_modes(row)},
        "deployed_tokens_per_second": {DEPLOYED: SAME if same else speed(row, "deployed_tokens_per_second")},
        "perplexity": {"perplexity": number(row["perplexity"])},
        "nll_difference": {"over the reference (95%, paired)": ratio_to_reference(row, reference)},
        "bandwidth_fraction": {"of the bandwidth": MISSING if fraction is None or not cuda else f"{fraction:.0%}"},
    }
    found: dict[str, str] = {}
    for column in shown_columns():
        found |= batches(row) if column.name == "perplexity" else {}
        found |= more.get(column.name, {column.heading: cell(column, value_of(row, column.name))})
    if asked := row.get("memory_at"):
        found[memory.title(asked)] = size(memory.total(row, asked))
    return found


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *rows)]


def table(results: Results, short: bool = False) -> str:
    """Return the Markdown between the markers: protocol, device, and the rows; empty columns are left out, and deployed
    speeds that are those measured.

    `short` keeps the columns of `SHORT` alone.
    """
    timed = [(row, found) for row in results["rows"] if (found := row["protocol"]["latency"])]
    if not timed:
        raise UserError("results.json: the speed of no row was measured")
    first, latency = timed[0]
    quality = first["protocol"]["quality"]
    # a row on several GPUs says so
    measured = {(str(row["device"]).rpartition(" x ")[2], *(told[name] for name in HEADING)) for row, told in timed}
    if len(measured) > 1:
        raise UserError("results.json: rows of several devices or protocols make no table")
    device, _, processes, repeats = next(iter(measured))
    protocol = (
        f"On {device}, batch 1, {latency['new_tokens']} new tokens after each prompt, "
        f"{processes} process{'es' if processes > 1 else ''} of {repeats} repeat{'s' if repeats > 1 else ''}"
    )
    if quality:
        protocol += (
            f"; perplexity by `{quality['perplexity']}` over {quality['windows']} windows of {quality['window']} tokens"
        )
    rows = [cells(row, results["config"]["reference"]) for row in results["rows"]]
    widest = max(rows, key=len)
    asked = SHORT if short else tuple(widest)
    headings = [heading for heading in asked if any(row.get(heading, MISSING) != MISSING for row in rows)]
    if DEPLOYED in headings and all(
        row["deployed_tokens_per_second"] == row["tokens_per_second"] for row in results["rows"]
    ):
        headings.remove(DEPLOYED)
    if len({row["model"] for row in rows}) == 1:
        headings.remove("model")
    shown = lines(headings, ([row.get(heading, MISSING) for heading in headings] for row in rows))
    loads = [] if short else load_lines(results.get("loads", ()))
    return "\n".join([f"{protocol}.", "", *shown, *loads])


def load_lines(loads: Sequence[Load]) -> list[str]:
    """Return the table of servers under load, and in words how many figures are refused."""
    good = [row for row in loads if row["load"] and not row["refused"]]
    shown = sorted((column for column in LOAD_COLUMNS if column.shown), key=lambda column: column.shown or 0)
    shown = [column for column in shown if any(value_of(row, column.name) is not None for row in good)]
    rows = [[cell(column, value_of(row, column.name)) for column in shown] for row in good]
    table = ["", *lines([column.heading for column in shown], rows)] if good else []
    refused = [row["refused"] for row in loads if row["refused"]]
    if refused:
        table += ["", f"Of {len(loads)} loads, the figures of {len(refused)} are refused; of the first: {refused[0]}."]
    return table
