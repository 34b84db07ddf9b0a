"""Two runs of a study as one, so that a page shows both on the same plots: FORMAT@before and FORMAT@after."""

from collections.abc import Mapping
from typing import Any

from reporting.pareto import mark_pareto


def merge(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """results.json with the rows of both, on one Pareto front; its reference is the one before."""
    rows = []
    for when, content in (("before", before), ("after", after)):
        for row in content["rows"]:
            missing = {column: why for column, why in row["missing"].items() if column != "run"}
            run = f"{row['run']}, {when}" if row["run"] else when
            rows.append({**row, "run": run, "missing": missing})
    mark_pareto(rows)
    models = after["config"]["models"] | before["config"]["models"]
    config = {**before["config"], "models": models, "reference": f"{before['config']['reference']}@before"}
    return {**before, "config": config, "rows": rows}


def page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The page of both. The closer look at texts and positions is left out: results.json does not hold it."""
    from reporting import axes, drawing, page  # whose libraries are in envs/tools alone

    both = merge(before, after)
    study = {"config": both["config"], "cells": [], "options": ""}
    return page.render(both, study, drawing.draw(axes.points(both["rows"])))
