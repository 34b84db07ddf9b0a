"""The table of columns is the only place that a new figure needs; and a row is known by its model, format and run."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from program_fixtures import Program
from whole_results import cell, edit, whole_cell, window_losses

from quantmill.report import columns, comparison, results
from quantmill.report.column import of_artifact
from quantmill.report.labels import mode_label

# one more column: one entry and one function
ADD = """
from quantmill.report.column import of_artifact
from quantmill.report.columns import COLUMNS
def count(artifact):
    return len(artifact['files'])
COLUMNS.append(of_artifact('files', 'integer', 'How many files the artifact has.', count, title='file count', unit='s',
                           better='lower', shown=5, judge='relative'))
"""
RATES = {"reference": 10.0, "other": 20.0}
CONFIG = {"reference": "reference", "models": {"m": {}}, "perplexity": "gptq-2048"}


def collect(*cells: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows by format and run, as the page calls them."""
    rows = results.collect({"config": CONFIG, "cells": list(cells)})["rows"]
    return {row["format"] + (f"@{row['run']}" if row["run"] else ""): row for row in rows}


@pytest.fixture(scope="module")
def report(run_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the report of a study by a program that has one more column."""
    folder = tmp_path_factory.mktemp("study")
    cells = [whole_cell(folder, name, rate, window_losses(rate / 10 - 1)) for name, rate in RATES.items()]
    study = {"config": CONFIG, "cells": cells, "options": "--cores 8"}
    (folder / "study.json").write_text(json.dumps(study))
    made = run_program("report.write", folder / "study.json", folder / "report", before=ADD)
    assert made.returncode == 0, made.stderr
    return folder / "report"


def test_a_new_column_is_in_every_output(
    report: Path, call: Callable, run_program: Program, tools_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (report / "results.csv").open() as file:
        assert [line["files"] for line in csv.DictReader(file)] == ["2", "2"]
    read = "import sys; from pyarrow import parquet; print(parquet.read_table(sys.argv[1]).column('files'))"
    assert "2" in call(tools_python, "-c", read, report / "results.parquet").stdout
    page = (report / "index.html").read_text()
    _, begun, rest = page.partition('"columns":')
    shown, _ = json.JSONDecoder().raw_decode(rest)
    assert begun and shown[-1] == {
        "name": "files",
        "title": "file count",
        "unit": "s",
        "text": "How many files the artifact has.",
        "better": "lower",
        "shown": 5,
    }
    content = json.loads((report / "results.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="files"):  # today's schema does not have it
        jsonschema.validate(content, columns.schema())
    new = of_artifact("files", "integer", "How many files the artifact has.", lambda artifact: len(artifact["files"]))
    monkeypatch.setattr(columns, "COLUMNS", [*columns.COLUMNS, new])
    jsonschema.validate(content, columns.schema())
    (report / "page.md").write_text(f"<!-- {report}: by make readme -->\n<!-- end -->\n")
    assert run_program("report.update_readme", report / "page.md", report, before=ADD).returncode == 0
    heading, _, first, _ = (line.split(" | ") for line in (report / "page.md").read_text().splitlines()[3:7])
    assert first[heading.index("file count, s")] == "2"


def test_a_new_column_is_compared(report: Path, run_program: Program) -> None:
    content = json.loads((report / "results.json").read_text())
    content["rows"][1]["files"] = 3
    (report / "after.json").write_text(json.dumps(content))
    result = run_program("report.compare", report / "results.json", report / "after.json", before=ADD)
    assert (result.returncode, result.stderr) == (1, "")
    assert "- WORSE: m, other (fake, d): file count, s 2 → 3, +50.0%" in result.stdout


def test_the_published_schema_has_the_columns_of_the_table() -> None:
    assert json.loads(columns.SCHEMA.read_text()) == columns.schema(), "run scripts/quantmill/report/write_schema.py"


def test_every_judge_exists_and_knows_the_better_direction() -> None:
    compared = comparison.figures()
    assert [column.name for column in compared][:2] == ["tokens_per_second", "perplexity"]
    assert all(column.judge in comparison.JUDGES and column.better for column in compared)


def run_of(made: dict[str, Any], run: str, format: str, **more: Any) -> dict[str, Any]:
    """Return a cell as another run of a format."""
    for path in (made["latency"], made["quality"]):
        edit(path, lambda content: content.update(more))
    return made | {"format": format, "run": run} | more


def test_a_run_is_compared_with_the_references_default_run(tmp_path: Path) -> None:
    rows = collect(
        run_of(cell(tmp_path, "first", 5, window_losses(1)), "slow", "reference"),
        cell(tmp_path, "reference", 10, window_losses(0)),
        run_of(cell(tmp_path, "third", 20, window_losses(1)), "fast", "other"),
        run_of(cell(tmp_path, "fourth", 30, window_losses(1)), "faster", "other", options={"dtype": "float16"}),
    )
    assert {
        name: (row["format"], row["run"], row["nll_verdict"], row["dominated_by"]) for name, row in rows.items()
    } == {
        "reference@slow": ("reference", "slow", "worse", ["reference", "other@fast", "other@faster"]),
        "reference": ("reference", None, "reference", []),
        "other@fast": ("other", "fast", "worse", ["other@faster"]),
        "other@faster": ("other", "faster", "worse", []),
    }
    assert rows["reference"]["missing"]["run"] == "the format's default run"
    assert "run" not in rows["other@fast"]["missing"]
    assert [row["options"] for row in rows.values()] == [{}, {}, {}, {"dtype": "float16"}]


@pytest.mark.parametrize(
    ("name", "measured", "asked"), [("options", {"a": 1}, {"a": 2}), ("gpus", 1, 2), ("engine", "transformers", "vllm")]
)
def test_another_runs_results_are_not_figures(tmp_path: Path, name: str, measured: object, asked: object) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))
    edit(made["latency"], lambda content: content.update({name: measured}))
    row = results.make_row(made | {name: asked}, CONFIG)
    assert row["tokens_per_second"] is None
    assert row["missing"]["tokens_per_second"] == f"was measured with another {name}; run again"
    assert results.make_row(made | {name: measured}, CONFIG)["tokens_per_second"] == 10


def test_rows_of_several_gpus_are_of_another_device(tmp_path: Path) -> None:
    one, two = cell(tmp_path, "reference", 10, window_losses(0)), cell(tmp_path, "other", 30, window_losses(0))
    rows = collect(one, run_of(two, "tp2", "other", gpus=2))
    assert (rows["reference"]["device"], rows["other@tp2"]["device"]) == ("d", "2 x d")
    assert rows["reference"]["pareto"] and rows["other@tp2"]["pareto"]  # neither is in the other's way
    assert rows["other@tp2"]["gpus"] == 2


def test_somebody_elses_artifact_says_so(tmp_path: Path) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0)) | {"prebuilt": True}
    edit(f"{made['artifact']}/quantmill.json", lambda content: content.update(prebuilt=True, build_s=None))
    row = collect(made)["reference"]
    assert row["build_s"] is None
    assert row["missing"]["build_s"] == "not built here"
    assert row["warnings"] == ["not built here: another publisher's artifact"]
    assert row["prebuilt"] is True


def test_an_engine_that_tells_no_divergence_leaves_it_empty(tmp_path: Path) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))

    def drop_kld(content: dict[str, Any]) -> None:
        content["summary"] |= {"kld_mean": None, "kld_lower_bound": None}
        del content["windows"]["kld"]

    edit(made["quality"], drop_kld)
    row = collect(made)["reference"]
    assert row["perplexity"] == 2
    assert row["kld_mean"] is row["above_noise_floor"] is None
    assert row["missing"]["kld_mean"] == row["missing"]["above_noise_floor"]


def test_ways_to_decode_that_are_quantmills_own_say_so() -> None:
    assert mode_label("captured") == "captured (Quantmill's own CUDA graph)"
    assert (mode_label("generate"), mode_label(None)) == ("generate", None)
