"""The result file's part of lm-evaluation-harness' results: figures of each name, and each document's answer."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from lm_eval.api.task import Task

from quantmill.common.program import UserError
from quantmill.tasks.harness import Loaded

PROMPT, CHOICE = 700, 300  # characters of the end of a prompt, and of an answer, that are stored
DIGITS = 8  # of a document's log-probabilities


def of_name(
    loaded: Loaded, results: Mapping[str, Any], metric: str | None, texts: bool, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return the result of a name of the config.

    Args:
        metric: the name of the metric that counts. By default the first that is 0 or 1 for each document, or else the
            first.
        texts: store the requests too.
        sizes: the number of all documents of each task.

    Raises:
        UserError: for a metric that the task does not have.
    """
    figures = results["results"][loaded.name]
    names = [name for name in figures if "," in name and "_stderr," not in name]
    shares = [name for name in names if is_share(loaded, results, name)]
    asked = [name for name in names if metric in (name, name.partition(",")[0])] if metric else shares or names
    if not asked:
        known = ", ".join(dict.fromkeys(name.partition(",")[0] for name in names))
        raise UserError(f"tasks.metrics.{loaded.name}: it has no metric {metric!r}; it has {known}")
    chosen = asked[0]
    higher = results["higher_is_better"].get(loaded.name, {}).get(chosen.partition(",")[0])
    return {
        "metric": chosen,
        "score": plain(figures[chosen]),
        "stderr": plain(figures.get(stderr_of(chosen))),
        "higher_is_better": higher,
        "share": chosen in shares,
        "metrics": {name: [plain(figures[name]), plain(figures.get(stderr_of(name)))] for name in names},
        "local": loaded.local,
        "tasks": {
            name: of_task(task, results, chosen, chosen in shares, texts, sizes[name])
            for name, task in loaded.tasks.items()
        },
    }


def of_task(task: Task, results: Mapping[str, Any], metric: str, share: bool, texts: bool, size: int) -> dict[str, Any]:
    """Return the result of a task with documents: its identity, its documents, and the answer to each."""
    name, (metric_name, _, filter_name) = task.task_name, metric.partition(",")
    samples = [each for each in results["samples"][name] if each["filter"] == filter_name]
    samples.sort(key=lambda each: each["doc_id"])
    config = json.dumps(results["configs"][name], sort_keys=True, default=str)
    hashes = "".join(each["doc_hash"] + each["prompt_hash"] for each in samples)
    return {
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        "output_type": task.OUTPUT_TYPE,
        "sha256": hashlib.sha256(without_place(config).encode()).hexdigest(),
        "documents_sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        "documents": len(samples),
        "of": size,
        "ids": [each["doc_id"] for each in samples],
        **({"correct": [int(each[metric_name]) for each in samples]} if share else {}),
        **({} if share else {"values": [plain(each.get(metric_name)) for each in samples]}),
        "answers": [answer(task, each, metric_name) for each in samples],
        "scores": [scores(task, each) for each in samples],
        **({"texts": [text(task, each) for each in samples]} if texts else {}),
    }


def is_share(loaded: Loaded, results: Mapping[str, Any], name: str) -> bool:
    """Return whether a metric is 0 or 1 for every document, so that its mean is a share."""
    metric, _, filter_name = name.partition(",")
    values = [
        each.get(metric) for task in loaded.tasks for each in results["samples"][task] if each["filter"] == filter_name
    ]
    return bool(values) and all(isinstance(value, (int, float, np.number)) and value in (0, 1) for value in values)


def answer(task: Task, sample: Mapping[str, Any], metric: str) -> int | str | None:
    """Return the answer: the number of a choice, a text, or whether the continuation is greedy; None without one."""
    found = sample["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(sample["doc"])
        sums = np.array([each[0] for each in found[: len(choices)]])
        lengths = {"acc_norm": [len(each) for each in choices], "acc_bytes": [len(each.encode()) for each in choices]}
        return int(np.argmax(sums / np.array(lengths.get(metric, 1), float)))
    if task.OUTPUT_TYPE == "loglikelihood":
        return int(found[0][1])
    return str(found[0])[:CHOICE] if task.OUTPUT_TYPE == "generate_until" else None


def scores(task: Task, sample: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities behind an answer, in nats; a written text has none."""
    found = sample["filtered_resps"]
    if task.OUTPUT_TYPE == "generate_until":
        return []
    return [float(f"{each if isinstance(each, float) else each[0]:.{DIGITS}g}") for each in found]


def text(task: Task, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request, and its choices or the right answer."""
    prompt = sample["arguments"][0][0][-PROMPT:]
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = [str(each)[:CHOICE] for each in task.doc_to_choice(sample["doc"])]
        return {"prompt": prompt, "choices": choices, "target": plain(sample["target"])}
    return {"prompt": prompt, "target": str(sample["target"])[-CHOICE:]}


def stderr_of(metric: str) -> str:
    """Return lm-evaluation-harness' name of a metric's standard error."""
    name, _, filter_name = metric.partition(",")
    return f"{name}_stderr,{filter_name}"


def plain(value: Any) -> Any:
    """Return a figure as JSON allows it; None for NaN and infinity."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return None if value == "N/A" else value


def without_place(config: str) -> str:
    """Return a task's config without the path of its YAML on this machine."""
    content = json.loads(config)
    if isinstance(content.get("metadata"), dict):
        content["metadata"].pop("config_source", None)
    return json.dumps(content, sort_keys=True)
