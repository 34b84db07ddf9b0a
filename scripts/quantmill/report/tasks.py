"""Tasks of lm-evaluation-harness: each row's score, and its answers paired with those of the model's reference.

results.json holds an entry for each row and task under `tasks`, if a study has any. results.csv, results.parquet and
the page show them as columns of the row, whose names are of the study's tasks: `task_NAME_score` and so on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantmill.metrics import bootstrap, flips, perplexity
from quantmill.report import memory
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS
from quantmill.report.labels import key, label
from quantmill.report.results import read_part
from quantmill.report.rows import Cell, Results, Row, Study, Task
from quantmill.report.task_columns import column_name, columns

WORST = 5  # flips that the page shows of a row and task
KEPT = ("metric", "score", "stderr", "higher_is_better", "share", "metrics", "local")
OF_TASKS = ("version", "num_fewshot", "output_type", "sha256", "documents_sha256", "documents", "of")
COUNTS = ("documents", "of", "limit", "tasks")
PAIRED = ("flips", "changed", "gained", "lost", "difference", "difference_low", "difference_high", "verdict")
ALONE = "nothing to compare it with"
OTHERS = "its documents or prompts are not the reference's; run its tasks again"
NO_FLIPS = "its metric does not say of a document whether its answer is right"
NO_PAIRS = f"{NO_FLIPS}, and is not a perplexity"
NOT_POOLED = "its figure is not the share of all its documents, so nothing is paired"


def read_tasks(cell: Cell, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return what a cell's job left of each task, or nothing and why."""
    if "tasks" not in cell:
        return {}, None
    found, why = read_part(cell, config, "tasks")
    return (found["tasks"], None) if found else ({}, why)


def collect(study: Study, rows: Sequence[Row]) -> list[Task]:
    """Return an entry for each row and task of a study."""
    config = study["config"]
    names = config.get("tasks", {}).get("names", [])
    if not names:
        return []
    found = {key(cell): read_tasks(cell, config) for cell in study["cells"]}
    entries: list[Any] = []
    for row in rows:
        mine, why = found[key(row)]
        theirs, _ = found.get((row["model"], config["reference"], None), ({}, None))
        for name in names:
            entry: dict[str, Any] = {"model": row["model"], "format": row["format"], "run": row["run"], "task": name}
            entry |= dict.fromkeys((*KEPT, *COUNTS, *PAIRED)) | {"missing": {}}
            entries.append(entry)
            result = mine.get(name)
            if result is None or "reason" in result:
                entry["missing"] = dict.fromkeys(
                    ("score", "stderr", "documents", *PAIRED), why or (result or {}).get("reason")
                )
                continue
            entry |= {each: result[each] for each in KEPT} | {"limit": config["tasks"].get("limit")}
            entry["tasks"] = {each: {name: part[name] for name in OF_TASKS} for each, part in result["tasks"].items()}
            for each in ("documents", "of"):
                entry[each] = sum(part[each] for part in result["tasks"].values())
            if entry["stderr"] is None:
                entry["missing"]["stderr"] = "lm-evaluation-harness gives none of this metric"
            values = compare(result, theirs.get(name), row)
            entry |= {each: value for each, value in values.items() if each in PAIRED}
            lacks = values.get("missing", ALONE)
            entry["missing"] |= {each: lacks for each in PAIRED if entry[each] is None}
    return entries


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any] | None, row: Row) -> dict[str, Any]:
    """Return `PAIRED` of a row's answers and the reference's, and under `missing` why some of them are not there.

    The rules are those of perplexity: a tie if the interval of the difference holds 0, or if the row is no further from
    the reference than the noise of the arithmetic.
    """
    if not theirs or "reason" in theirs:
        return {"missing": ALONE}
    pairs = [(mine["tasks"][name], theirs["tasks"].get(name)) for name in mine["tasks"]]
    if any(not other or one["documents_sha256"] != other["documents_sha256"] for one, other in pairs):
        return {"missing": OTHERS}
    if (mine["metric"], mine["share"]) != (theirs["metric"], theirs["share"]):
        return {"missing": NO_PAIRS}
    answers = [each for one, other in pairs for each in zip(one["answers"], other["answers"], strict=True)]
    found: dict[str, Any] = {"missing": NO_FLIPS}
    if None not in answers[0]:
        found["changed"] = sum(one != other for one, other in answers) / len(answers)
    if mine["share"]:
        right, was = ([each for part in side for each in part["correct"]] for side in zip(*pairs, strict=True))
        if abs(sum(right) / len(right) - mine["score"]) > 1e-9:
            return {"missing": NOT_POOLED}
        gained, lost = flips.count(right, was)
        low, high = flips.interval(gained, lost, len(right))
        found |= {"flips": (gained + lost) / len(right), "gained": gained, "lost": lost}
        difference, better = (gained - lost) / len(right), gained > lost
    else:
        losses, base = (losses_of(side) for side in zip(*pairs, strict=True))
        if losses is None or base is None:
            return {"missing": NO_PAIRS}
        if len(losses[1]) < bootstrap.MINIMUM:
            return {"missing": f"an interval wants {bootstrap.MINIMUM} documents"}
        difference, low, high, _ = perplexity.paired_difference(losses[0], base[0], losses[1])
        better = difference < 0
    if mine is theirs:
        return found | {"difference": 0.0, "difference_low": 0.0, "difference_high": 0.0, "verdict": "reference"}
    tie = low <= 0 <= high or row["above_noise_floor"] is False
    verdict = "tie" if tie else "better" if better else "worse"
    return found | {"difference": difference, "difference_low": low, "difference_high": high, "verdict": verdict}


def without_pairs(entry: Task, why: str) -> Task:
    """Return a task's entry without what it says of itself beside a reference."""
    bare: Any = {**entry, **dict.fromkeys(PAIRED), "missing": entry["missing"] | dict.fromkeys(PAIRED, why)}
    return bare


def losses_of(parts: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return NLL in nats and what it is divided by (words or bytes), both [documents], of a task that rolls over its
    texts; None of another."""
    values = [each for part in parts for each in part.get("values", ())]
    if not all(isinstance(each, list) and len(each) == 2 for each in values) or not values:
        return None
    return -np.array([each[0] for each in values]), np.array([each[1] for each in values], float)


def worst(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the flips whose log-probabilities moved most, with their texts; of generated answers, the first ones."""
    found = []
    for name, part in mine["tasks"].items():
        other = theirs["tasks"].get(name, {})
        if part.get("documents_sha256") != other.get("documents_sha256") or "correct" not in part:
            continue
        for place, (one, was) in enumerate(zip(part["correct"], other["correct"], strict=True)):
            if one != was and "texts" in other:
                flip = {"task": name, "document": part["ids"][place], "right": bool(one), **other["texts"][place]}
                flip |= {"answer": part["answers"][place], "was": other["answers"][place]}
                found.append(flip | {"nats": shift(part, other, place)})
    return sorted(found, key=lambda each: -each["nats"])[:WORST]


def shift(part: Mapping[str, Any], other: Mapping[str, Any], place: int) -> float:
    """Return the nats by which the two answers of a document moved against each other; 0 without probabilities."""
    one, was = part["scores"][place], other["scores"][place]
    if not one:
        return 0.0
    answer, before = part["answers"][place], other["answers"][place]
    if len(one) > max(answer, before) and answer != before:
        return round(abs((one[answer] - one[before]) - (was[answer] - was[before])), 4)
    return round(abs(one[0] - was[0]), 4)


def widen(results: Results) -> tuple[list[Column], list[Row]]:
    """Return all columns, those that the study asks for last (of memory, then of tasks), and the rows of results.json
    with their values and reasons."""
    more, asked = [*memory.columns(results), *columns(results)], results["config"].get("memory_at")
    entries: dict[Any, list[Any]] = {}
    for entry in results.get("tasks", ()):
        entries.setdefault(key(entry), []).append(entry)
    rows: list[Any] = []  # rows with columns beyond those of the class
    for row in results["rows"]:
        values: dict[str, Any] = dict.fromkeys(column.name for column in more)
        missing = dict(row["missing"])
        if asked:
            figures, why = memory.values(row, asked)
            values |= figures
            missing |= {name: why or "not measured" for name, figure in figures.items() if figure is None}
        for entry in entries.get(key(row), ()):
            for figure in ("score", "stderr", "documents", *PAIRED):
                name = column_name(entry["task"], figure)
                if name in values:
                    values[name] = entry[figure]
                    if figure in entry["missing"]:
                        missing[name] = entry["missing"][figure] or "not measured"
        rows.append({**row, **values, "missing": missing})
    return [*COLUMNS, *more], rows


def axes(table: Sequence[Column]) -> list[str]:
    """Return the columns that can be an axis of the plot: shares of right answers."""
    return [each.name for each in table if each.parts == ("tasks",) and each.name.endswith("_score") and each.limits]


def details(cells: Sequence[Cell], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return of each row of one model, by its label and task, all metrics, counts of documents and the worst flips."""
    found = {label(cell): read_tasks(cell, config)[0] for cell in cells}
    theirs = found.get(config["reference"], {})
    told: dict[str, dict[str, Any]] = {}
    for name, mine in found.items():
        for task, result in mine.items():
            if "reason" in result:
                continue
            other = theirs.get(task)
            flipped = worst(result, other) if other and "reason" not in other and other is not result else []
            documents = [sum(part[count] for part in result["tasks"].values()) for count in ("documents", "of")]
            told.setdefault(name, {})[task] = {"metrics": result["metrics"], "documents": documents, "flips": flipped}
    return told
