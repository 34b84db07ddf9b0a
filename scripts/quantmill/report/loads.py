"""Rows of servers under load, from what loads.measure wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmill.report.load_columns import LARGEST_RATE, LOAD_COLUMNS
from quantmill.report.results import absence, mismatch, read

# what a refused load still tells
KEPT = {"model", "format", "run", "engine", "device", "gpus", "load", "slots", "refused", "notes", "interference"}


def collect(study: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all servers of a study; of one without a result, one row that says why. `alone`: the rows of the study's
    cells, which were measured one request at a time."""
    config = study["config"]
    known = {tuple(row[name] for name in ("model", "format", "run")): row for row in alone}
    served = [cell for cell in study["cells"] if cell.get("loads")]
    return [row for cell in served for row in _rows(cell, config, known[cell["model"], cell["format"], cell["run"]])]


def _rows(cell: Mapping[str, Any], config: Mapping[str, Any], alone: Mapping[str, Any]) -> list[dict[str, Any]]:
    why = absence(cell, "loads")
    if not why:
        result = read(Path(cell["loads"]), "loads")
        why = mismatch(cell, config, result)
    if why:
        known = [column for column in LOAD_COLUMNS if column.parts == ("cell",)]
        values = dict.fromkeys(column.name for column in LOAD_COLUMNS)
        values |= {column.name: column.value({"cell": cell}) for column in known} | {"notes": [], "interference": []}
        return [values | {"missing": {name: why for name, value in values.items() if value is None}, "quantiles": {}}]
    loads = [*result["loads"], *([_largest(result["goodput"])] if result["goodput"] else [])]
    return [_row(cell, result, load, alone) for load in loads]


def _largest(found: Mapping[str, Any]) -> dict[str, Any]:
    """The search for the largest rate as a load."""
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
        "interference": found.get("interference", []),  # older files have none
        "quantiles": {},
        "trials": [[trial["rate"], trial["met"] / trial["arrived"]] for trial in found["trials"]],
    }


def _row(
    cell: Mapping[str, Any], result: Mapping[str, Any], load: Mapping[str, Any], alone: Mapping[str, Any]
) -> dict[str, Any]:
    found = {"cell": cell, "measured": result, "load": load, "row": alone}
    values = {column.name: column.value(found) for column in LOAD_COLUMNS}
    refused = values["refused"]
    missing = {}
    for column in LOAD_COLUMNS:
        if refused and column.name not in KEPT:
            values[column.name] = None
        if values[column.name] is None:
            why = load["missing"].get(column.name, column.why_missing)
            missing[column.name] = f"refused: {refused}" if refused and column.name not in KEPT else why
    missing = {name: why for name, why in missing.items() if why}
    extra = {"quantiles": {} if refused else load["quantiles"], "trials": load.get("trials")}
    return values | {"missing": missing} | {name: value for name, value in extra.items() if value is not None}
