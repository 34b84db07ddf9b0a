"""Memory in use: in the row, in every table, and in the verdict of the terminal."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import REPO
from program_fixtures import Program
from whole_results import edit, whole_cell, window_losses

from quantmill.report import columns, markdown, memory, merge_studies, results, summary, tasks

ASKED = {"context": 1000, "users": 4, "budget_gb": 24.0}
CONFIG = {"reference": "reference", "models": {"m": {}}, "perplexity": "gptq-2048", "memory_at": ASKED}
FOOTPRINT = {"weight_bytes": 10 * 10**9, "cache": {"layers": [{"count": 2, "token_bytes": 1e6}]}}
NAMES = ["memory_at_bytes", "memory_at_weights_bytes", "memory_at_kv_cache_bytes"]


@pytest.fixture
def cells(tmp_path: Path) -> list[dict[str, Any]]:
    """Four rows: the reference takes 48 GB, `fits` 18 GB; `untold` has no footprint, `older` was measured before."""
    rates = {"reference": 10.0, "fits": 20.0, "untold": 40.0, "older": 80.0}
    made = [whole_cell(tmp_path, name, rate, window_losses(0)) for name, rate in rates.items()]
    said = [FOOTPRINT | {"weight_bytes": 40 * 10**9}, FOOTPRINT, None]
    for each, footprint in zip(made, said, strict=False):
        edit(each["latency"], lambda content, footprint=footprint: content.update(footprint=footprint))
    return made


def collect(cells: list[dict[str, Any]], **asked: Any) -> Any:
    config = CONFIG | {"memory_at": {key: value for key, value in (ASKED | asked).items() if value is not None}}
    return json.loads(json.dumps(results.collect({"config": config, "cells": cells})))


def test_a_row_holds_weights_and_cache_or_the_reason(cells: list[dict[str, Any]]) -> None:
    Path(cells[3]["latency"]).unlink()
    content = collect(cells)
    jsonschema.validate(content, columns.schema())
    held = [row["memory_at"] for row in content["rows"]]
    asked = {"context": 1000, "users": 4}
    assert held[1] == asked | {"weights_bytes": 10 * 10**9, "kv_cache_bytes": 8 * 10**9, "reason": None}
    nothing = asked | {"weights_bytes": None, "kv_cache_bytes": None}
    assert held[2] == nothing | {"reason": "its engine does not report what its weights and its cache take"}
    assert held[3]["reason"].startswith("failed")  # as its speed is
    table, rows = tasks.widen(content)
    assert [column.name for column in table[-3:]] == NAMES
    assert [rows[0][name] for name in NAMES] == [48 * 10**9, 40 * 10**9, 8 * 10**9]
    assert {rows[3]["missing"][name] for name in NAMES} == {held[3]["reason"]}


def test_a_result_of_before_says_so(cells: list[dict[str, Any]]) -> None:
    assert collect(cells)["rows"][3]["memory_at"]["reason"] == memory.OLDER
    assert results.failures(collect(cells)["rows"][3]) == []  # which does not fail the study


def test_weights_are_known_without_the_cache(cells: list[dict[str, Any]]) -> None:
    edit(cells[1]["latency"], lambda content: content["footprint"].update(cache=None))
    content = collect(cells)
    _, rows = tasks.widen(content)
    assert [rows[1][name] for name in NAMES] == [None, 10 * 10**9, None]
    assert rows[1]["missing"]["memory_at_bytes"] == memory.NO_CACHE


def test_a_study_that_does_not_ask_has_no_such_column(cells: list[dict[str, Any]]) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "memory_at"}
    content = results.collect({"config": config, "cells": cells})
    assert not any("memory_at" in row for row in content["rows"])
    assert tasks.widen(content)[0] == columns.COLUMNS


def test_every_table_has_it(
    cells: list[dict[str, Any]], tmp_path: Path, run_program: Program, call: Callable, tools_python: Path
) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"config": CONFIG, "cells": cells, "options": "--cores 8"}))
    out = tmp_path / "report"
    made = run_program("report.write", tmp_path / "study.json", out)
    assert made.returncode == 0, made.stderr
    with (out / "results.csv").open() as file:
        assert [line["memory_at_bytes"] for line in csv.DictReader(file)] == ["48000000000", "18000000000", "", ""]
    read = "import sys; from pyarrow import parquet; f = parquet.read_schema(sys.argv[1]).field('memory_at_bytes'); "
    read += "print(f.type, f.metadata[b'unit'].decode(), f.metadata[b'description'].decode())"
    assert call(tools_python, "-c", read, out / "results.parquet").stdout == (
        "int64 B Weights and cache, with 1,000 tokens and 4 users (METHODS.md, Memory in use).\n"
    )
    heading, _, _, line, *_ = markdown.table(collect(cells)).splitlines()[2:]
    place = heading.split(" | ").index("memory, 4 x 1,000 tokens |")
    assert line.split(" | ")[place] == "18 GB |"
    specifications = (out / "index.html").read_text().partition('"plots":')[2]
    assert json.JSONDecoder().raw_decode(specifications)[0].keys() >= {"perplexity/memory_at_bytes"}


def test_the_verdict_names_what_fits(cells: list[dict[str, Any]]) -> None:
    said = summary.verdict(collect(cells)["rows"], "reference", ASKED)
    assert said == (
        "fastest at no more than 1% loss: fits, 20 tokens/s; no loss beyond the noise; fits 24 GB: 18 GB with 1,000 "
        "tokens and 4 users"
    )
    tight = ASKED | {"budget_gb": 17.9}
    assert summary.verdict(collect(cells)["rows"], "reference", tight) == (
        "nothing that was measured is known to fit 17.9 GB with 1,000 tokens and 4 users"
    )
    free = {"context": 1000, "users": 4}
    said = summary.verdict(collect(cells, budget_gb=None)["rows"], "reference", free)
    assert said.startswith("fastest at no more than 1% loss: older, 80 tokens/s")
    assert summary.text(collect(cells), "page").splitlines()[0].startswith("m: fastest at no more than 1% loss: fits")


@pytest.mark.parametrize("asked", [{"context": 2000}, {"users": 1}])
def test_figures_of_another_study_are_not_mixed(cells: list[dict[str, Any]], asked: dict[str, int]) -> None:
    one, other = collect(cells[:2]), collect(cells[:2], **asked)
    for row in other["rows"]:
        row["artifact"] = row["artifact"] | {"source": {"sha256": "other"}}
    merged, _ = merge_studies.merge({"one": one, "other": other})
    _, rows = tasks.widen(merged)
    assert [row["memory_at_bytes"] for row in rows] == [48 * 10**9, 18 * 10**9, None, None]
    assert rows[3]["missing"]["memory_at_bytes"] == memory.ELSEWHERE


PUBLISH = """
import json, sys
from quantmill.publish import public
content = json.load(open(sys.argv[1]))
known = public.of_study(content)
rows = [row | {"versions": {}, "artifact": None} for row in content["rows"]]
print(json.dumps([public.row(row, known)["memory_at"] for row in rows]))
"""


def test_it_may_be_published(cells: list[dict[str, Any]], tmp_path: Path, call: Callable, tools_python: Path) -> None:
    content = collect(cells)
    (tmp_path / "results.json").write_text(json.dumps(content))
    result = call(tools_python, "-c", PUBLISH, tmp_path / "results.json", cwd=REPO / "scripts")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [row["memory_at"] for row in content["rows"]]
