"""The rows of many studies as one report, in which only what was measured alike stands beside each other.

Rows are alike where model, device, text and both protocols are: each such group is a section of the page, as a model is
in a study's own, so that no verdict, plot or Pareto front reaches from one to another.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from quantmill.common.program import UserError
from quantmill.report import repetition
from quantmill.report.comparison import DECODING
from quantmill.report.labels import key, label
from quantmill.report.pareto import mark_pareto, relate
from quantmill.report.tasks import without_pairs

OTHER = "it was compared with the reference of its own study"
Row = Mapping[str, Any]


def conditions(row: Row, others: Sequence[Row]) -> dict[str, Any]:
    """What has to be the same for two rows to be compared. `others`: the rows of its study and model, which tell what a
    row does not that lacks its speed or its quality."""

    def told(name: str) -> Any:
        return next((each["protocol"][name] for each in (row, *others) if each["protocol"][name]), {})

    latency = told("latency")
    return {
        "model": row["model"],
        "source": source(row, others),
        "device": next((each["device"] for each in (row, *others) if each["device"]), None),
        "latency": {name: latency.get(name) for name in DECODING},
        "quality": told("quality"),
    }


def source(row: Row, others: Sequence[Row]) -> Any:
    """Which weights a model is: the hashes of its files; of other people's artifacts, those of the row's study."""
    built = [each for each in (row, *others) if each["artifact"] and not each["prebuilt"]]
    found = built[0]["artifact"].get("source", {}) if built else {}
    return found.get("sha256")


def digest(content: Any) -> str:
    """One name for equal JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def merge(studies: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """results.json of all studies (by name): its models are the sections. And for each of its rows the study's name and
    the row's place there.

    Rows that two studies share, such as a report and what was published of it, appear once. A row whose label another
    study's has too is called FORMAT@STUDY. Raises `UserError` where the studies compare with different references.
    """
    references = {name: content["config"]["reference"] for name, content in studies.items()}
    if len(set(references.values())) > 1:
        said = ", ".join(f"{reference} in {name}" for name, reference in references.items())
        raise UserError(f"the studies compare with different references ({said}); collect those of each apart")
    groups: dict[str, list[tuple[dict[str, Any], str, int]]] = {}
    described: dict[str, dict[str, Any]] = {}
    seen = set()
    for name, content in studies.items():
        for place, row in enumerate(content["rows"]):
            others = [each for each in content["rows"] if each["model"] == row["model"]]
            alike = conditions(row, others)
            group = digest(alike)
            same = digest([group, key(row), figures_of(row)])
            if same in seen:
                continue
            seen.add(same)
            described[group] = alike
            groups.setdefault(group, []).append((deepcopy(dict(row)), name, place))
    names = section_names(described)
    reference = next(iter(references.values()))
    rows, origins, models, tasks = [], [], {}, []
    for group, found in groups.items():
        rename(found)
        model = found[0][0]["model"]
        models[names[group]] = studies[found[0][1]]["config"]["models"][model]
        base, home = next(((row, name) for row, name, _ in found if label(row) == reference), (None, None))
        for row, name, place in found:
            row["model"] = names[group]
            compare(row, base)
            rows.append(row)
            origins.append((name, place))
            mine = [each for each in studies[name].get("tasks", ()) if key(each) == key(studies[name]["rows"][place])]
            mine = [{**each, "model": row["model"], "run": row["run"]} for each in mine]
            tasks += mine if home in (None, name) else [without_pairs(each, OTHER) for each in mine]
    mark_pareto(rows)
    first = next(iter(studies.values()))
    config = {**first["config"], "models": models}
    kept = {name: value for name, value in first.items() if name not in ("loads", "tasks")}
    return {**kept, "config": config, "rows": rows, **({"tasks": tasks} if tasks else {})}, origins


def figures_of(row: Row) -> Any:
    """What two rows that are one have in common."""
    return row["artifact"] and row["artifact"].get("files_sha256"), row["latency_summary"], row["quality_totals"]


def rename(found: Sequence[tuple[dict[str, Any], str, int]]) -> None:
    """Set the run of rows whose label an earlier one has: it names their study."""
    labels: set[str] = set()
    for row, name, _ in found:
        if label(row) in labels:
            row["run"] = f"{row['run']}, {name}" if row["run"] else name
            row["missing"].pop("run", None)
        labels.add(label(row))


def compare(row: dict[str, Any], base: Row | None) -> None:
    """Set a row beside the reference of its section; where there is none, what it says of its own study's stays."""
    row |= {"pareto": None, "dominated_by": None}
    row["missing"].pop("pareto", None)
    if base is not None and base["quality_windows"]:
        relate(row, base)
        repetition.relate(row, base)


def section_names(described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What each group is called: its model, and where there are several groups, how it was measured."""
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
