"""Tasks in the report: answers beside the reference's, columns with the study's own names, and why one is empty."""

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from test_schema import errors
from whole_results import whole_cell, window_losses

from quantmill.metrics import METRICS_VERSION, flips
from quantmill.report import merge_runs, results, tasks

RIGHT = [1] * 60 + [0] * 40  # of the reference
# 3 of the wrong ones turn right, 15 of the right ones wrong; two wrong answers change and stay wrong
OTHER = [0] * 15 + [1] * 45 + [1] * 3 + [0] * 37


def result(correct: list[int], changed: int = 0, **more: Any) -> dict[str, Any]:
    """Return the result of a task with two choices and documents whose answer is always the first."""
    answers = [0 if each else 1 for each in correct]
    answers[-changed or len(answers) :] = [2] * changed
    scores = [[-1.0, -2.0 - number / 100, -3.0] for number in range(len(correct))]
    texts = [{"prompt": f"What of {number}?", "choices": ["this", "that", "no"], "target": 0} for number in range(100)]
    part = {"version": 1.0, "num_fewshot": 0, "output_type": "multiple_choice", "sha256": "c", "documents_sha256": "d"}
    part |= {"documents": len(correct), "of": 400, "ids": list(range(len(correct))), "correct": correct}
    part |= {"answers": answers, "scores": scores, "texts": texts}
    score = sum(correct) / len(correct)
    figures = {"metric": "acc,none", "score": score, "stderr": 0.05, "higher_is_better": True, "share": True}
    return figures | {"metrics": {"acc,none": [score, 0.05]}, "local": False, "tasks": {"quiz": part}} | more


def pages(extra: float) -> dict[str, Any]:
    """Return the result of a task that rolls over ten texts of 50 words, `extra` nats more each."""
    part = result([1])["tasks"]["quiz"] | {
        "output_type": "loglikelihood_rolling",
        "documents": 10,
        "documents_sha256": "p",
    }
    part |= {"values": [[-100.0 - number - extra, 50] for number in range(10)], "answers": [None] * 10}
    part = {name: value for name, value in part.items() if name not in ("correct", "texts")}
    figures = {"metric": "word_perplexity,none", "score": 8.0, "stderr": None, "higher_is_better": False}
    return figures | {"share": False, "metrics": {}, "local": True, "tasks": {"pages": part}}


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Make a study of cells by name, each with results of tasks, or a reason why its file is missing."""

    def make(**found: Any) -> dict[str, Any]:
        cells = []
        for number, (name, content) in enumerate(found.items()):
            cell = whole_cell(tmp_path, name.replace("_", "-"), 10 + number, window_losses(number))
            artifact = json.loads((Path(cell["artifact"]) / "quantmill.json").read_text())
            path = Path(cell["artifact"]) / "tasks.json"
            whole = {"kind": "tasks", "metrics_version": METRICS_VERSION, "artifact": artifact, "engine": "fake"}
            whole |= {"protocol": {"tasks": asked, "seed": 0}, "summary": {"tasks": 2}, "tasks": content}
            if content is not None:
                path.write_text(json.dumps(whole))
            cells.append(cell | {"tasks": str(path), "logs": cell["logs"] | {"tasks": [f"{path}.log"]}})
        config = {"reference": "reference", "models": {"m": {}}, "perplexity": "gptq-2048", "tasks": asked, "seed": 0}
        return {"config": config, "cells": cells, "options": "--cores 8"}

    asked = {"names": ["quiz", "my-pages"], "limit": 100, "metrics": {}, "chat_template": False}
    return make


def collect(study: dict[str, Any]) -> dict[str, Any]:
    collected = results.collect(study)
    return collected | {"tasks": tasks.collect(study, collected["rows"])}


def entries(collected: dict[str, Any], task: str) -> dict[str, dict[str, Any]]:
    return {entry["format"]: entry for entry in collected["tasks"] if entry["task"] == task}


def test_flips_and_the_verdict_are_those_of_the_answers(study: Callable) -> None:
    whole = study(
        reference={"quiz": result(RIGHT), "my-pages": pages(0)},
        worse={"quiz": result(OTHER, changed=2), "my-pages": pages(5)},
        same={"quiz": result([*RIGHT[:59], 0, *RIGHT[60:]]), "my-pages": pages(0)},
    )
    collected = collect(whole)
    assert errors(json.loads(json.dumps(collected))) == []
    quiz, mine = entries(collected, "quiz"), entries(collected, "my-pages")
    worse = quiz["worse"]
    assert (worse["gained"], worse["lost"], worse["flips"], worse["changed"]) == (3, 15, 0.18, 0.2)
    assert worse["difference"] == pytest.approx(-0.12)
    assert (worse["difference_low"], worse["difference_high"]) == flips.interval(3, 15, 100)
    assert [quiz[name]["verdict"] for name in ("reference", "worse", "same")] == ["reference", "worse", "tie"]
    assert (worse["documents"], worse["of"], worse["limit"]) == (100, 400, 100)
    assert quiz["reference"]["difference_low"] == quiz["reference"]["difference_high"] == 0
    assert (mine["worse"]["difference"], mine["worse"]["verdict"]) == (pytest.approx(0.1), "worse")
    assert mine["same"]["verdict"] == "tie"
    assert mine["worse"]["flips"] is None
    assert "whether its answer is right" in mine["worse"]["missing"]["flips"]


def test_a_score_within_the_noise_floor_is_a_tie(study: Callable) -> None:
    whole = study(reference={"quiz": result(RIGHT)}, worse={"quiz": result(OTHER)})
    rows = results.collect(whole)["rows"]
    rows[1]["above_noise_floor"] = False
    found = {entry["format"]: entry for entry in tasks.collect(whole, rows) if entry["task"] == "quiz"}
    assert found["worse"]["verdict"] == "tie"
    assert found["worse"]["difference_high"] < 0


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "score", "failed, or never ran"),
        ({"quiz": {"reason": "its engine returns no probabilities of a text"}}, "score", "returns no probabilities"),
        ({"quiz": result(RIGHT) | {"metric": "f1,none", "share": False}}, "flips", "is not a perplexity"),
        ({"quiz": result(RIGHT) | {"score": 0.7}}, "flips", "not the share of all its documents"),
        ({"quiz": result(RIGHT) | {"tasks": {"quiz": {**result(RIGHT)["tasks"]["quiz"], "documents_sha256": "other"}}}},
         "verdict", "not the reference's"),
    ],
)  # fmt: skip
def test_an_empty_cell_says_why(study: Callable, content: Any, name: str, said: str) -> None:
    collected = collect(study(reference={"quiz": result(RIGHT)}, other=content))
    assert errors(json.loads(json.dumps(collected))) == []
    table, rows = tasks.widen(collected)
    assert rows[1][f"task_quiz_{name}"] is None
    assert said in rows[1]["missing"][f"task_quiz_{name}"]
    empty = {column.name for column in table if rows[1][column.name] is None}
    assert empty == set(rows[1]["missing"])


def test_task_columns_have_the_studys_names(study: Callable) -> None:
    whole = study(reference={"quiz": result(RIGHT), "my-pages": pages(0)})
    collected = collect(whole)
    table, rows = tasks.widen(collected)
    names = [column.name for column in table if column.parts == ("tasks",)]
    assert names[:3] == ["task_quiz_score", "task_quiz_stderr", "task_quiz_documents"]
    assert "task_my_pages_score" in names
    assert rows[0]["task_quiz_score"] == 0.6
    assert tasks.axes(table) == ["task_quiz_score"]
    assert {column.name: column.better for column in table}["task_my_pages_score"] == "lower"
    plain = {**whole, "config": {**whole["config"], "tasks": {"names": []}}}
    assert tasks.collect(plain, collected["rows"]) == []
    assert tasks.widen(results.collect(plain))[0] == results.COLUMNS


def test_the_worst_flips_come_first_with_their_texts(study: Callable) -> None:
    whole = study(reference={"quiz": result(RIGHT)}, worse={"quiz": result(OTHER)})
    path = Path(whole["cells"][1]["tasks"])
    content = json.loads(path.read_text())
    part = content["tasks"]["quiz"]["tasks"]["quiz"]
    part["scores"][7] = [-9.0, -1.0, -3.0]
    del part["texts"]  # only the reference's file has them
    path.write_text(json.dumps(content))
    told = tasks.details(whole["cells"], whole["config"])
    assert told["reference"]["quiz"]["flips"] == []
    first, *others = told["worse"]["quiz"]["flips"]
    assert len(others) == tasks.WORST - 1
    assert (first["document"], first["right"], first["prompt"]) == (7, False, "What of 7?")
    # of the reference -1 and -2.07, here -9 and -1: the two moved 9.07 nats against each other
    assert (first["was"], first["answer"], first["nats"]) == (0, 1, pytest.approx(9.07))


def test_two_runs_have_the_tasks_of_both(study: Callable) -> None:
    before = collect(study(reference={"quiz": result(RIGHT), "my-pages": pages(0)}))
    after = {**before, "tasks": [{**entry, "score": 0.1} for entry in before["tasks"]]}
    table, rows = tasks.widen(merge_runs.merge(before, after))
    assert [(row["run"], row["task_quiz_score"]) for row in rows] == [("before", 0.6), ("after", 0.1)]
    assert tasks.axes(table) == ["task_quiz_score"]


def test_the_csv_and_the_page_have_them(study: Callable, tmp_path: Path, call: Callable, tools_python: Path) -> None:
    whole = study(
        reference={"quiz": result(RIGHT), "my-pages": pages(0)}, worse={"quiz": result(OTHER), "my-pages": pages(5)}
    )
    (tmp_path / "study.json").write_text(json.dumps(whole))
    made = call(tools_python, "scripts/quantmill", "report.write", tmp_path / "study.json", tmp_path / "report")
    assert made.returncode == 0, made.stderr
    with (tmp_path / "report/results.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["task_quiz_score"], first["task_quiz_verdict"]) == ("0.6", "reference")
    assert (second["task_quiz_score"], second["task_quiz_flips"], second["task_quiz_verdict"]) == (
        "0.48",
        "0.18",
        "worse",
    )
    page = (tmp_path / "report/index.html").read_text()
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert "task_quiz_score" in data["axes"]["quality"] and "task_quiz_score" in data["axes"]["more is better"]
    assert "task_quiz_score/tokens_per_second" in data["plots"]
    assert data["details"]["m"]["formats"]["worse"]["tasks"]["quiz"]["flips"][0]["prompt"].startswith("What of ")


def test_the_terminal_names_a_row_whose_tasks_alone_failed(study: Callable, tmp_path: Path, tools_python: Path) -> None:
    whole = study(reference={"quiz": result(RIGHT), "my-pages": pages(0)}, unasked=None)
    Path(whole["cells"][1]["logs"]["tasks"][0]).write_text("error: no answer\n")
    (tmp_path / "study.json").write_text(json.dumps(whole))
    command = [
        tools_python,
        "scripts/quantmill",
        "report.write",
        tmp_path / "study.json",
        tmp_path / "report",
        "--incomplete",
    ]
    made = subprocess.run(command, cwd=REPO, input="[]", capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[:2] == [
        "Not complete: 1 of 2 formats failed.",
        "m/unasked: failed: no answer",
    ]
