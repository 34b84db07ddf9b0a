"""Two runs of a study as one, so that a page shows both on the same plots: FORMAT@before and FORMAT@after."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from quantmill.report import repetition
from quantmill.report.labels import label
from quantmill.report.pareto import PAIRED, mark_pareto, perplexity_ratio, relate
from quantmill.report.tasks import without_pairs

OWN = "it was compared with the reference of its own run"


def merge(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """results.json with the rows, tasks and loads of both, on one Pareto front. Its reference is the one before, with
    which the rows after are compared too: a reference that became worse took all of its rows along."""
    old, new = rename(before, "before"), rename(after, "after")
    reference = before["config"]["reference"]
    found = {(row["model"], label(row)): row for row in (*old["rows"], *new["rows"])}
    for row in new["rows"]:
        compare(row, *(found.get((row["model"], f"{reference}@{when}")) for when in ("before", "after")))
    new["tasks"] = [without_pairs(entry, OWN) for entry in new["tasks"]]
    both = {name: [*old[name], *new[name]] for name in old}
    mark_pareto(both["rows"])
    models = after["config"]["models"] | before["config"]["models"]
    config = {**before["config"], "models": models, "reference": f"{reference}@before"}
    served = (each["config"] for each in (before, after) if each.get("loads"))
    # the limits of the loads
    config |= next(({"loads": each["loads"]} for each in served if "loads" in each), {})
    kept = {name: content for name, content in before.items() if name not in both}
    return {**kept, "config": config, **{name: entries for name, entries in both.items() if entries}}


def rename(content: Mapping[str, Any], when: str) -> dict[str, list[dict[str, Any]]]:
    """Rows, tasks and loads, with runs that say of which of the two they are; loads also say what the default run is
    called now, which has the loss of a server that tells none."""
    found = {name: deepcopy(list(content.get(name, ()))) for name in ("rows", "tasks", "loads")}
    for entry in (entry for entries in found.values() for entry in entries):
        entry["run"] = f"{entry['run']}, {when}" if entry["run"] else when
        entry["missing"].pop("run", None)
    for load in found["loads"]:
        load["default_run"] = when
    return found


def compare(row: dict[str, Any], first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> None:
    """Set a row after beside its model's reference before, `first`. Whether it is above the noise floor is said of the
    one after, `second`: that stays where the two cannot be told apart."""
    between = first and second and perplexity_ratio(second, first)
    if not between or not between["tie"]:
        row["above_noise_floor"], row["missing"]["above_noise_floor"] = None, OWN
    row |= dict.fromkeys(PAIRED)
    relate(row, first)
    repetition.relate(row, first)


def page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The page of both. The closer look at texts and positions is left out: results.json does not hold it."""
    from quantmill.report import axes, drawing, page, tasks  # whose libraries are in envs/tools alone

    both = merge(before, after)
    study = {"config": both["config"], "cells": [], "options": ""}
    table, rows = tasks.widen(both)
    drawn = drawing.draw(axes.points(rows, tasks.axes(table)), loads="loads" in both)
    return page.render(both, study, drawn)
