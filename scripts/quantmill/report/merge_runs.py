"""Two runs of a study as one, so that a page shows both on the same plots: FORMAT@before and FORMAT@after."""

from copy import deepcopy

from quantmill.report.labels import label, rename_run
from quantmill.report.pareto import mark_pareto, perplexity_ratio, relate
from quantmill.report.rows import Results, Row, Study
from quantmill.report.tasks import without_pairs

OWN = "it was compared with the reference of its own run"


def merge(before: Results, after: Results) -> Results:
    """Return results.json with the rows, tasks and loads of both, on one Pareto front.

    Its reference is the one before, with which the rows after are compared too: a reference that became worse took all
    of its rows along.
    """
    old, new = rename(before, "before"), rename(after, "after")
    reference = before["config"]["reference"]
    merged = Results(**{**old, "rows": [*old["rows"], *new["rows"]]})
    found = {(row["model"], label(row)): row for row in merged["rows"]}
    for row in new["rows"]:
        compare(row, *(found.get((row["model"], f"{reference}@{when}")) for when in ("before", "after")))
    if "tasks" in old or "tasks" in new:
        merged["tasks"] = [*old.get("tasks", ()), *(without_pairs(entry, OWN) for entry in new.get("tasks", ()))]
    if "loads" in old or "loads" in new:
        merged["loads"] = [*old.get("loads", ()), *new.get("loads", ())]
    mark_pareto(merged["rows"])
    models = after["config"]["models"] | before["config"]["models"]
    merged["config"] = {**before["config"], "models": models, "reference": f"{reference}@before"}
    served = [each["config"]["loads"] for each in (before, after) if each.get("loads") and "loads" in each["config"]]
    if served:
        merged["config"]["loads"] = served[0]  # the limits
    return merged


def rename(content: Results, when: str) -> Results:
    """Return a copy whose rows, tasks and loads say in their runs of which of the two they are. Loads also name the
    default run, which has the loss of a server that reports none."""
    found = deepcopy(content)
    for entry in (*found["rows"], *found.get("tasks", ()), *found.get("loads", ())):
        rename_run(entry, when)
    for load in found.get("loads", ()):
        load["default_run"] = when
    return found


def compare(row: Row, first: Row | None, second: Row | None) -> None:
    """Compare an AFTER row with the BEFORE reference (`first`).

    Its noise-floor flag refers to the AFTER reference (`second`), and is kept only if the two references tie.
    """
    between = first and second and perplexity_ratio(second, first)
    if not between or not between["tie"]:
        row["above_noise_floor"], row["missing"]["above_noise_floor"] = None, OWN
    row["nll_difference"] = row["nll_difference_low"] = row["nll_difference_high"] = row["nll_verdict"] = None
    relate(row, first)


def page(before: Results, after: Results) -> str:
    """Return the page of both, without the closer look at texts and positions, which results.json does not hold."""
    from quantmill.report import axes, drawing, page, tasks  # whose libraries are in envs/tools alone

    both = merge(before, after)
    table, rows = tasks.widen(both)
    drawn = drawing.draw(axes.points(rows, tasks.axes(table)), loads="loads" in both)
    return page.render(both, Study(config=both["config"], cells=[], options=""), drawn)
