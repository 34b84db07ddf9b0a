"""A study with tasks: what it asks anew, and what a task that is not there costs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import interpreter
from workflows import SNAKEMAKE, jobs, rows, study_of_demo

FORMATS = "models: {demo: {source: demo}}\nformats: [fp16, ct2-int8]\n"
TASKS = "tasks: {names: [%s], limit: 6, include: tests/data/tasks}\n"


@pytest.mark.slow
def test_tasks_join_a_study_alone(demo: Path, call: Callable, tmp_path: Path) -> None:
    root = study_of_demo(demo, tmp_path, FORMATS)
    config, python = root / "config/config.yaml", json.dumps({"lm-eval": str(interpreter("lm-eval"))})[1:-1]
    text = config.read_text().replace("interpreters: {", f"interpreters: {{{python}, ")

    def report(names: str | None, code: int = 0) -> None:
        config.write_text(text + (TASKS % names if names else ""))
        result = call(SNAKEMAKE, "--cores", "8", "report", cwd=root)
        assert result.returncode == code, result.stdout + result.stderr

    report(None)
    plain = rows(root)
    report("next_words, next_wrods", 1)
    entries = json.loads((root / "artifacts/report/results.json").read_text())["tasks"]
    nearest = "has no task 'next_wrods'; did you mean 'next_words'?"
    why = f"failed: tasks: lm-evaluation-harness and tests/data/tasks {nearest}"
    assert {entry["missing"]["score"] for entry in entries} == {why}
    assert {name: row["kld_mean"] for name, row in rows(root).items()} == {
        name: row["kld_mean"] for name, row in plain.items()
    }

    config.write_text(text + TASKS % "next_words, last_words")
    asked = {"task_documents last_words", "tasks fp16", "tasks ct2-int8"}
    assert jobs(call, root) == {*asked, "study", "page", "report"}
    report("next_words, last_words")
    found = rows(root)
    for name, row in plain.items():
        assert {column: found[name][column] for column in row} == row
        assert found[name]["task_next_words_documents"] == found[name]["task_last_words_documents"] == "6"
    assert found["fp16"]["task_next_words_verdict"] == "reference"
    assert found["ct2-int8"]["task_next_words_verdict"] in ("tie", "worse", "better")
    assert jobs(call, root) == set()
