"""Make rows of servers under load from the results of loads.measure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmill.report.labels import key
from quantmill.report.load_columns import LARGEST_RATE, LOAD_COLUMNS
from quantmill.report.results import absence, mismatch, read_result
from quantmill.report.rows import Cell, Load, Row, Study

# columns that a refused load still has
KEPT = {"model", "format", "run", "engine", "device", "gpus", "load", "slots", "refused", "notes", "interference"}


def collect(study: Study, alone: Sequence[Row]) -> list[Load]:
    """Return the rows of all servers of a study; of one without a result, one row that says why.

    `alone`: the rows of the study's cells, measured one request at a time.
    """
    config = study["config"]
    known = {key(row): row for row in alone}
    served = [cell for cell in study["cells"] if cell.get("loads")]
    return [row for cell in served for row in _rows(cell, config, known[key(cell)])]


def _rows(cell: Cell, config: Mapping[str, Any], alone: Row) -> list[Any]:
    why = absence(cell, "loads")
    result = {} if why else read_result(Path(str(cell["loads"])), "loads")
    if why := why or mismatch(cell, config, result):
        known = [column for column in LOAD_COLUMNS if column.parts == ("cell",)]
        values: dict[str, Any] = dict.fromkeys(column.name for column in LOAD_COLUMNS)
        values |= {column.name: column.value({"cell": cell}) for column in known} | {"notes": [], "interference": []}
        return [values | {"missing": {name: why for name, value in values.items() if value is None}, "quantiles": {}}]
    loads = [*result["loads"], *([_largest(result["goodput"])] if result["goodput"] else [])]
    return [_row(cell, result, load, alone) for load in loads]


def _largest(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the search for the largest rate as a load."""
    figures = {"rate_ci_low": found["proven"], "rate_ci_high": found["refuted"]}
    missing = dict.fromkeys((column.name for column in LOAD_COLUMNS), "a search is of many loads: see its trials")
    missing["rate"] = "no rate that was tried met the limits"
    return {
        "load": LARGEST_RATE,
        "slots": None,
        "rate": found["rate"],
        "figures": figures,
        "missing": missing | dict.fromkeys(figures, "no rate's share is that surely so"),
        "findings": found["findings"],
        "interference": found["interference"],
        "quantiles": {},
        "trials": [[trial["rate"], trial["met"] / trial["arrived"]] for trial in found["trials"]],
    }


def _row(cell: Cell, result: Mapping[str, Any], load: Mapping[str, Any], alone: Row) -> dict[str, Any]:
    found = {"cell": cell, "measured": result, "load": load, "row": alone}
    values = {column.name: column.value(found) for column in LOAD_COLUMNS}
    reasons = {column.name: load["missing"].get(column.name, column.why_missing) for column in LOAD_COLUMNS}
    if refused := values["refused"]:
        lost = [name for name in values if name not in KEPT]
        values |= dict.fromkeys(lost)
        reasons |= dict.fromkeys(lost, f"refused: {refused}")
    missing = {name: why for name, why in reasons.items() if values[name] is None and why}
    extra = {"trials": load["trials"]} if "trials" in load else {}
    return values | {"missing": missing, "quantiles": {} if refused else load["quantiles"]} | extra
