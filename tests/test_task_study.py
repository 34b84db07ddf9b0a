"""A study with tasks: what it asks anew, and what a task that is not there costs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import interpreter
from workflows import LATENCY, SHORT, SNAKEMAKE, jobs, rows, study

FORMATS = "models: {demo: {source: demo}}\nformats: [fp16, ct2-int8]\n" + SHORT + LATENCY
TASKS = "tasks: {names: [%s], limit: 6, include: tests/data/tasks}\n"


@pytest.mark.slow
def test_tasks_are_added_to_a_study_without_another_job_and_a_wrong_name_costs_tasks_alone(
    checkout: Callable[[], Path], call: Callable, torch_python: Path, tools_python: Path
) -> None:
    root = checkout()

    def write(names: str | None) -> list[str]:
        options = study(root, FORMATS + (TASKS % names if names else ""))
        text = (root / "study.yaml").read_text()
        python = json.dumps({"lm-eval": str(interpreter("lm-eval"))})[1:-1]
        (root / "study.yaml").write_text(text.replace("interpreters: {", f"interpreters: {{{python}, "))
        return options

    result = call(SNAKEMAKE, *write(None), cwd=root)
    assert result.returncode == 0, result.stderr
    plain = rows(root)
    result = call(SNAKEMAKE, *write("next_words, next_wrods"), cwd=root)
    assert result.returncode == 1
    entries = json.loads((root / "artifacts/report/results.json").read_text())["tasks"]
    nearest = "has no task 'next_wrods'; did you mean 'next_words'?"
    why = f"failed: tasks: lm-evaluation-harness and tests/data/tasks {nearest}"
    assert {entry["missing"]["score"] for entry in entries} == {why}
    assert {name: row["kld_mean"] for name, row in rows(root).items()} == {
        name: row["kld_mean"] for name, row in plain.items()
    }

    options = write("next_words, last_words")
    asked = {"task_documents last_words", "tasks fp16", "tasks ct2-int8"}
    assert jobs(call, root, *options[3:]) == {*asked, "study", "page", "report"}
    result = call(SNAKEMAKE, *options, cwd=root)
    assert result.returncode == 0, result.stderr
    found = rows(root)
    for name, row in plain.items():
        assert {column: found[name][column] for column in row} == row
        assert found[name]["task_next_words_documents"] == found[name]["task_last_words_documents"] == "6"
    assert found["fp16"]["task_next_words_verdict"] == "reference"
    assert found["ct2-int8"]["task_next_words_verdict"] in ("tie", "worse", "better")
    assert jobs(call, root, *options[3:]) == set()
