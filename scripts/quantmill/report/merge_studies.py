"""The rows of many studies as one report, in which only rows that were measured alike are compared.

Rows are alike if model, device, text and both protocols are: each such group is a section of the page, as a model is in
a study's own, so that no verdict, plot or Pareto front spans two of them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from quantmill.common.program import UserError
from quantmill.report.comparison import DECODING
from quantmill.report.labels import key, label, rename_run
from quantmill.report.pareto import mark_pareto, relate
from quantmill.report.rows import Results, Row, Task
from quantmill.report.tasks import without_pairs

OTHER = "it was compared with the reference of its own study"


def conditions(row: Row, others: Sequence[Row]) -> dict[str, Any]:
    """Return what has to be equal for two rows to be compared.

    `others`: the rows of its study and model, which supply what a row without speed or quality lacks.
    """
    every = (row, *others)
    latency = next((told for each in every if (told := each["protocol"]["latency"])), {})
    built = next((each["artifact"] for each in every if each["artifact"] and not each["prebuilt"]), {})
    return {
        "model": row["model"],
        "source": built.get("source", {}).get("sha256"),  # of its files; of a prebuilt artifact, that of the study
        "device": next((each["device"] for each in every if each["device"]), None),
        "latency": {name: latency.get(name) for name in DECODING},
        "quality": next((told for each in every if (told := each["protocol"]["quality"])), {}),
    }


def digest(content: Any) -> str:
    """Return one name for equal JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def merge(studies: Mapping[str, Results]) -> tuple[Results, list[tuple[str, int]]]:
    """Return results.json of all studies (by name), whose models are the sections, and the study and place of each row.

    Rows that two studies share, such as a report and what was published of it, appear once. A row whose label another
    study's has too is called FORMAT@STUDY. Raises `UserError` if the studies compare with different references.
    """
    references = {name: content["config"]["reference"] for name, content in studies.items()}
    if len(set(references.values())) > 1:
        said = ", ".join(f"{reference} in {name}" for name, reference in references.items())
        raise UserError(f"the studies compare with different references ({said}); collect those of each apart")
    groups: dict[str, list[tuple[Row, str, int]]] = {}
    described: dict[str, dict[str, Any]] = {}
    seen = set()
    for name, content in studies.items():
        for place, row in enumerate(content["rows"]):
            alike = conditions(row, [each for each in content["rows"] if each["model"] == row["model"]])
            group = digest(alike)
            built = row["artifact"] and row["artifact"].get("files_sha256")
            same = digest([group, key(row), built, row["latency_summary"], row["quality_totals"]])
            if same in seen:
                continue
            seen.add(same)
            described[group] = alike
            groups.setdefault(group, []).append((deepcopy(row), name, place))
    names = section_names(described)
    reference = next(iter(references.values()))
    rows: list[Row] = []
    origins: list[tuple[str, int]] = []
    models: dict[str, Any] = {}
    tasks: list[Task] = []
    for group, found in groups.items():
        rename(found)
        models[names[group]] = studies[found[0][1]]["config"]["models"][found[0][0]["model"]]
        base, home = next(((row, name) for row, name, _ in found if label(row) == reference), (None, None))
        for row, name, place in found:
            row["model"] = names[group]
            if base and base["quality_windows"]:  # else what it says beside its own study's reference stays
                relate(row, base)
            rows.append(row)
            origins.append((name, place))
            for each in studies[name].get("tasks", ()):
                if key(each) == key(studies[name]["rows"][place]):
                    mine = each if home in (None, name) else without_pairs(each, OTHER)
                    tasks.append(Task(**{**mine, "model": row["model"], "run": row["run"]}))
    mark_pareto(rows)
    first = next(iter(studies.values()))
    merged = Results(**{**first, "config": {**first["config"], "models": models}, "rows": rows})
    merged.pop("loads", None)
    merged.pop("tasks", None)
    if tasks:
        merged["tasks"] = tasks
    return merged, origins


def rename(found: Sequence[tuple[Row, str, int]]) -> None:
    """Name the study in the run of each row whose label an earlier one has."""
    labels: set[str] = set()
    for row, name, _ in found:
        if label(row) in labels:
            rename_run(row, name)
        labels.add(label(row))


def section_names(described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name each group by its model, and if there are several groups, by how it was measured."""
    names: dict[str, str] = {}
    for group, alike in described.items():
        words = [alike["model"]]
        if len(described) > 1:
            latency, quality = alike["latency"], alike["quality"]
            words += [alike["device"] or "no device"]
            words += [f"{latency['new_tokens']} new tokens"] if latency["new_tokens"] else []
            words += [f"{quality['perplexity']} on text {quality['text_sha256'][:8]}"] if quality else []
        name = ", ".join(words)
        same = sum(other == name or other.startswith(f"{name} (") for other in names.values())
        names[group] = f"{name} ({same + 1})" if same else name
    return names
