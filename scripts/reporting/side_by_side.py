"""Two runs of a study as one, so that a page shows both on the same plots: FORMAT@before and FORMAT@after."""

from collections.abc import Mapping
from typing import Any

from reporting.pareto import mark_pareto


def merge(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """results.json with the rows of both, on one Pareto front; its reference is the one before."""
    rows, tasks = [], []
    for when, content in (("before", before), ("after", after)):
        for row in content["rows"]:
            missing = {column: why for column, why in row["missing"].items() if column != "run"}
            rows.append({**row, "run": rename(row["run"], when), "missing": missing})
        tasks += [{**entry, "run": rename(entry["run"], when)} for entry in content.get("tasks", ())]
    mark_pareto(rows)
    models = after["config"]["models"] | before["config"]["models"]
    config = {**before["config"], "models": models, "reference": f"{before['config']['reference']}@before"}
    return {**before, "config": config, "rows": rows, "tasks": tasks}


def rename(run: str | None, when: str) -> str:
    """What a run is called beside another of the same name."""
    return f"{run}, {when}" if run else when


def page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The page of both. The closer look at texts and positions is left out: results.json does not hold it."""
    from reporting import axes, drawing, page, tasks  # whose libraries are in envs/tools alone

    both = merge(before, after)
    study = {"config": both["config"], "cells": [], "options": ""}
    table, rows = tasks.widen(both)
    return page.render(both, study, drawing.draw(axes.points(rows, tasks.axes(table))))
