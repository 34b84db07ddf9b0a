"""Tasks of lm-evaluation-harness: each row's score, and its answers beside those of the model's reference.

results.json holds an entry for each row and task under `tasks`, where a study has any. results.csv, results.parquet and
the page show them as columns of the row, whose names are of the study's tasks: `task_NAME_score` and so on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantmill.metrics import bootstrap, flips, perplexity
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS
from quantmill.report.labels import key, label
from quantmill.report.results import read_part
from quantmill.report.task_columns import column_name, columns

WORST = 5  # flips that the page shows of a row and task
KEPT = ("metric", "score", "stderr", "higher_is_better", "share", "metrics", "local")
OF_TASKS = ("version", "num_fewshot", "output_type", "sha256", "documents_sha256", "documents", "of")
COUNTS = ("documents", "of", "limit", "tasks")
PAIRED = ("flips", "changed", "gained", "lost", "difference", "difference_low", "difference_high", "verdict")
ALONE = "nothing to compare it with"
OTHERS = "its documents or prompts are not the reference's; run its tasks again"
NO_FLIPS = "its metric does not say of a document whether its answer is right"
NO_PAIRS = f"{NO_FLIPS}, and is no perplexity"
NOT_POOLED = "its figure is not the share of all its documents, so nothing is paired"


def read(cell: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """What a cell's job left of each task, or nothing and why."""
    if "tasks" not in cell:
        return {}, None
    found, why = read_part(cell, config, "tasks")
    return (found["tasks"], None) if found else ({}, why)


def collect(study: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An entry for each row and task of a study; none where it asks no tasks."""
    config = study["config"]
    names = config.get("tasks", {}).get("names", [])
    if not names:
        return []
    found = {key(cell): read(cell, config) for cell in study["cells"]}
    entries = []
    for row in rows:
        mine, why = found[key(row)]
        theirs, _ = found.get((row["model"], config["reference"], None), ({}, None))
        for name in names:
            entry = {each: row[each] for each in ("model", "format", "run")} | {"task": name}
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


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any] | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """`PAIRED` of a row's answers beside the reference's, and under `missing` why some of them are not there.

    By the rules of perplexity: a tie where the interval of the difference holds 0, or where the row is no further from
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
        one, other = ([each for part in side for each in part["correct"]] for side in zip(*pairs, strict=True))
        if abs(sum(one) / len(one) - mine["score"]) > 1e-9:
            return {"missing": NOT_POOLED}
        gained, lost = flips.count(one, other)
        low, high = flips.interval(gained, lost, len(one))
        found |= {"flips": (gained + lost) / len(one), "gained": gained, "lost": lost}
        difference, better = (gained - lost) / len(one), gained > lost
    elif (losses := [losses_of(side) for side in zip(*pairs, strict=True)]) and None not in losses:
        (one, counts), (other, _) = losses
        if len(counts) < bootstrap.MINIMUM:
            return {"missing": f"an interval wants {bootstrap.MINIMUM} documents"}
        difference, low, high, _ = perplexity.paired_difference(one, other, counts)
        better = difference < 0
    else:
        return {"missing": NO_PAIRS}
    if mine is theirs:
        return found | {"difference": 0.0, "difference_low": 0.0, "difference_high": 0.0, "verdict": "reference"}
    tie = low <= 0 <= high or row["above_noise_floor"] is False
    verdict = "tie" if tie else "better" if better else "worse"
    return found | {"difference": difference, "difference_low": low, "difference_high": high, "verdict": verdict}


def without_pairs(entry: Mapping[str, Any], why: str) -> dict[str, Any]:
    """A task's entry without what it says of itself beside a reference."""
    return {**entry, **dict.fromkeys(PAIRED), "missing": entry["missing"] | dict.fromkeys(PAIRED, why)}


def losses_of(parts: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray] | None:
    """NLL in nats and what it is divided by (words or bytes), both [documents], of a task that rolls over its texts;
    None of another."""
    values = [each for part in parts for each in part.get("values", ())]
    if not all(isinstance(each, list) and len(each) == 2 for each in values) or not values:
        return None
    return -np.array([each[0] for each in values]), np.array([each[1] for each in values], float)


def worst(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The flips whose log-probabilities moved most, with their texts; of what is written, the first ones."""
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
    """Nats by which the two answers of a document moved against each other; 0 where none are told."""
    one, was = part["scores"][place], other["scores"][place]
    if not one:
        return 0.0
    answer, before = part["answers"][place], other["answers"][place]
    if len(one) > max(answer, before) and answer != before:
        return round(abs((one[answer] - one[before]) - (was[answer] - was[before])), 4)
    return round(abs(one[0] - was[0]), 4)


def widen(results: Mapping[str, Any]) -> tuple[list[Column], list[dict[str, Any]]]:
    """All columns, those of tasks last, and the rows of results.json with their values and reasons."""
    more = columns(results)
    entries: dict[Any, list[Mapping[str, Any]]] = {}
    for entry in results.get("tasks", ()):
        entries.setdefault(key(entry), []).append(entry)
    rows = []
    for row in results["rows"]:
        values: dict[str, Any] = dict.fromkeys(column.name for column in more)
        missing = dict(row["missing"])
        for entry in entries.get(key(row), ()):
            for figure in ("score", "stderr", "documents", *PAIRED):
                name = column_name(entry["task"], figure)
                if name in values:
                    values[name] = entry[figure]
                    if figure in entry["missing"]:
                        missing[name] = entry["missing"][figure] or "not measured"
        rows.append(row | values | {"missing": missing})
    return [*COLUMNS, *more], rows


def axes(table: Sequence[Column]) -> list[str]:
    """Columns that can be an axis of the plot: shares of right answers."""
    return [each.name for each in table if each.parts == ("tasks",) and each.name.endswith("_score") and each.limits]


def details(cells: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each row of one model, by its label and task: all metrics, which documents, and the worst flips."""
    found = {label(cell): read(cell, config)[0] for cell in cells}
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
