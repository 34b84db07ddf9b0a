"""The published schema of results.json says what is really written, column by column; results.parquet has its types."""

import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import REPO
from whole_results import collect_results, edit, whole_cell, window_losses

from quantmill.metrics import COMPARABLE, METRICS_VERSION
from quantmill.report import columns, deployed, results, tasks
from quantmill.report.rows import Row

SCHEMA = json.loads(columns.SCHEMA.read_text())
UNITS = {column.name: column.unit for column in columns.COLUMNS}
DESCRIBED = {name: SCHEMA["$defs"]["row"]["properties"][name] for name in UNITS}


def errors(content: Any) -> list[str]:
    """Return the schema's errors of a results.json."""
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(content)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """Rows with and without quality."""
    cells = [
        whole_cell(tmp_path, "reference", 10, window_losses(0)),
        whole_cell(tmp_path, "other", 20, window_losses(1)),
        whole_cell(tmp_path, "random", 30, None, model="shape"),
    ]
    return collect_results(cells)


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["properties"]["schema_version"]["const"] == results.SCHEMA_VERSION


def test_its_columns_are_those_of_results_csv() -> None:
    row = SCHEMA["$defs"]["row"]
    assert list(row["properties"])[: len(UNITS)] == list(UNITS)
    assert {name: column.get("unit", "") for name, column in DESCRIBED.items()} == UNITS
    assert set(row["properties"]) >= set(Row.__annotations__)
    assert set(row["properties"]) - set(row["required"]) == {"memory_at"}  # of a study that asks for it


@pytest.mark.parametrize("name", list(UNITS))
def test_every_column_is_typed_and_described_in_a_sentence(name: str) -> None:
    assert DESCRIBED[name]["description"].endswith(".")
    assert len(DESCRIBED[name]["description"]) > 20
    assert DESCRIBED[name]["type"]


def test_what_is_written_is_what_it_says(run: dict[str, Any]) -> None:
    assert errors(run) == []


def test_a_cell_whose_latency_failed_may_be_null(run: dict[str, Any]) -> None:
    row = run["rows"][0]
    speed = [*columns.figures("latency"), *deployed.NAMES, "device", "interference", "pareto"]
    row |= dict.fromkeys(speed) | {"missing": dict.fromkeys(speed, "its job failed")}
    beyond = (
        "compute_type",
        "mode",
        "differs",
        "deterministic",
        "versions",
        "threads",
        "latency_summary",
        "lengths",
        "batches",
        "conditions",
    )
    row |= dict.fromkeys((*beyond, "other_modes", "device_details", "copy_bandwidth_bytes_per_second"))
    row["protocol"]["latency"] = None
    assert errors(run) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tokens_per_second", "fast", "rows.1.tokens_per_second: 'fast' is not of type 'number', 'null'"),
        ("model", None, "rows.1.model: None is not of type 'string'"),
        ("top1_agreement", 1.5, "rows.1.top1_agreement: 1.5 is greater than the maximum of 1"),
        ("nll_verdict", "fine", "rows.1.nll_verdict: 'fine' is not one of"),
        ("missing", {"speed": "why"}, "rows.1.missing: 'speed' is not one of"),
        ("new_figure", 1, "rows.1: Additional properties are not allowed ('new_figure' was unexpected)"),
    ],
)
def test_it_refuses_what_is_never_written(run: dict[str, Any], name: str, value: object, said: str) -> None:
    run["rows"][1][name] = value
    (error,) = errors(run)
    assert error.startswith(said)


@pytest.mark.parametrize("path", sorted(REPO.glob("results/*/results.json")), ids=lambda path: path.parent.name)
def test_recorded_runs_are_what_it_says(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["metrics_version"] in COMPARABLE
    assert errors(content) == []
    table, rows = tasks.widen(content)
    results.write_csv(tmp_path / "results.csv", rows, table)
    recorded, written = (
        list(csv.DictReader(each.open())) for each in (path.with_name("results.csv"), tmp_path / "results.csv")
    )
    assert recorded == written
    assert {row["engine"] for row in written if row["format"].startswith("mlc-")} <= {"quantmill-tvm"}
    for row in content["rows"]:
        assert {name for name in UNITS if row[name] is None} == set(row["missing"])


READ = """
import json, sys
from pyarrow import parquet
table = parquet.read_table(sys.argv[1])
told = lambda field: {name.decode(): value.decode() for name, value in field.metadata.items()}
fields = {field.name: [str(field.type), told(field)] for field in table.schema}
print(json.dumps({"fields": fields, "rows": table.to_pylist()}))
"""


def test_parquet_holds_typed_rows_of_results_csv(call: Callable, tmp_path: Path, tools_python: Path) -> None:
    cells = [
        whole_cell(tmp_path, "reference", 10.0, window_losses(0)),
        whole_cell(tmp_path, "random", 30.5, None, model="shape"),
    ]
    edit(cells[1]["latency"], lambda content: content.update(interference=["a busy host", "heat"]))
    config = {"reference": "reference", "models": {"m": {}, "shape": {}}, "perplexity": "gptq-2048"}
    (tmp_path / "study.json").write_text(json.dumps({"config": config, "cells": cells, "options": "--cores 8"}))
    report = tmp_path / "report"
    made = call(tools_python, "scripts/quantmill", "report.write", tmp_path / "study.json", report)
    assert made.returncode == 0, made.stderr
    assert errors(json.loads((report / "results.json").read_text())) == []
    read = call(tools_python, "-c", READ, report / "results.parquet")
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)

    fields, (first, second) = found["fields"], found["rows"]
    assert list(fields)[: len(UNITS)] == list(UNITS)
    assert fields["tokens_per_second"][0] == fields["kld_mean"][0] == "double"
    assert fields["size_bytes"][0] == fields["peak_memory_bytes"][0] == fields["new_tokens"][0] == "int64"
    assert fields["pareto"][0] == "bool"
    assert fields["model"][0] == fields["nll_verdict"][0] == "string"
    assert fields["interference"][0].startswith("list<")
    assert {name: fields[name][1].get("unit", "") for name in UNITS} == UNITS

    with (report / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, (first, second), strict=True):
        row = row | {"interference": "; ".join(row["interference"]) or "none"}
        assert line == {name: "" if row[name] is None else str(row[name]) for name in line}
    assert second["perplexity"] is second["pareto"] is second["perplexity_protocol"] is None
    assert second["tokens_per_second"] == 30.5
    assert second["interference"] == ["a busy host", "heat"]
    assert first["results_sha256"] == hashlib.sha256((report / "results.json").read_bytes()).hexdigest()
    assert (
        first["config_sha256"]
        == hashlib.sha256(
            b'{"models":{"m":{},"shape":{}},"perplexity":"gptq-2048","reference":"reference"}'
        ).hexdigest()
    )
    assert (first["metrics_version"], first["perplexity_protocol"], first["text_sha256"], first["new_tokens"]) == (
        *(METRICS_VERSION, "gptq-2048", "ab12", 200),
    )
