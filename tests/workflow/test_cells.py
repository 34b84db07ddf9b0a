"""Runs, variants and prebuilt artifacts in a study that was finished without them: each cell is a row of its own, and
an artifact is built once."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import AUTOGPTQ
from workflows import SNAKEMAKE, study_of_demo

Rows = dict[str, dict[str, Any]]
pytestmark = pytest.mark.slow


def add_cells(demo: Path, folder: Path, call: Callable, config: str) -> tuple[Path, str]:
    """Copy the finished demo and run the study of `config` there; return it and Snakemake's output."""
    root = study_of_demo(demo, folder, config)
    result = call(SNAKEMAKE, "--cores", "8", "report", cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
    return root, result.stdout + result.stderr


def rows(root: Path) -> Rows:
    found = json.loads((root / "artifacts/report/results.json").read_text())["rows"]
    return {row["format"] + (f"@{row['run']}" if row["run"] else ""): row for row in found}


@pytest.fixture(scope="module")
def study(demo: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    theirs = tmp_path_factory.mktemp("theirs")
    for name in ("gptq-int4", "ct2-int8"):
        ignore = shutil.ignore_patterns("quantmill.json", ".*")
        shutil.copytree(demo / "artifacts/demo" / name, theirs / name, ignore=ignore)
    return add_cells(
        demo,
        tmp_path_factory.mktemp("cells"),
        call,
        f"""
models:
  demo:
    source: demo
    prebuilt:
      theirs: {{layout: gptq, path: {theirs}/gptq-int4}}
      theirs-ct2: {{layout: ct2, path: {theirs}/ct2-int8}}
formats: [fp16, ct2-int8, gptq-int4]
runs:
  half: {{engine: transformers, formats: [fp16], options: {{dtype: bfloat16}}}}
  again: {{engine: ctranslate2, formats: [theirs-ct2], options: {{compute_type: float32}}}}
""",
    )


def test_each_cell_is_a_row(study: tuple[Path, str]) -> None:
    found = rows(study[0])
    names = ["fp16", "fp16@half", "ct2-int8", "gptq-int4", "theirs", "theirs-ct2", "theirs-ct2@again"]
    assert list(found) == names
    assert [row["options"] for row in found.values() if row["options"]] == [
        {"dtype": "bfloat16"},
        {"compute_type": "float32"},
    ]
    assert [name for name, row in found.items() if row["prebuilt"]] == names[4:]
    assert all(row["tokens_per_second"] > 0 and row["perplexity"] > 1 for row in found.values())
    page = (study[0] / "artifacts/report/index.html").read_text()
    assert "fp16@half" in page


def test_options_reach_the_engine(study: tuple[Path, str]) -> None:
    found = rows(study[0])
    assert [found[name]["compute_type"] for name in ("fp16", "fp16@half")] == ["float32", "bfloat16"]
    assert found["theirs-ct2"]["compute_type"].startswith("int8")
    assert found["theirs-ct2@again"]["compute_type"] == "float32"
    assert 0 < found["fp16@half"]["kld_mean"] < 1e-3


def test_an_equal_prebuilt_artifact_has_equal_figures(study: tuple[Path, str]) -> None:
    found = rows(study[0])
    for theirs, ours in (("theirs", "gptq-int4"), ("theirs-ct2", "ct2-int8")):
        assert found[theirs]["perplexity"] == pytest.approx(found[ours]["perplexity"], rel=1e-12)
        assert found[theirs]["bits_per_weight"] == found[ours]["bits_per_weight"]
        assert found[theirs]["build_s"] is None
    assert found["theirs"]["size_bytes"] == found["gptq-int4"]["size_bytes"]
    gate = json.loads((study[0] / "artifacts/demo/theirs/quantmill.json").read_text())["gate"]
    assert gate["faithful"]["divergence"] <= gate["faithful"]["tolerance"]


def test_only_the_new_cells_were_measured(study: tuple[Path, str]) -> None:
    """Nothing of the demo is built or measured again for its new runs."""
    ran = re.findall(r"^(?:local)?rule (\w+):$", study[1], re.MULTILINE)
    assert sorted(set(ran) - {"report"}) == ["latency", "page", "prebuilt", "quality", "study"]
    cells = re.findall(r"wildcards: model=demo, cell=([\w@.-]+)", study[1])
    assert sorted(cells) == sorted(2 * ["fp16@half", "theirs", "theirs-ct2", "theirs-ct2@again"])


@pytest.mark.skipif(not AUTOGPTQ, reason="envs/autogptq wants Python 3.11")
def test_two_engines_run_each_others_gptq(demo: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, said = add_cells(
        demo,
        tmp_path_factory.mktemp("gptq"),
        call,
        """
models: {demo: {source: demo}}
formats: [fp16, gptq-int4, autogptq-int4]
variants: {gptq-g32: {format: gptq-int4, group_size: 32}}
runs:
  autogptq: {engine: autogptq, formats: [gptq-int4]}
  gptqmodel: {engine: gptqmodel, formats: [autogptq-int4]}
""",
    )
    found = rows(root)
    engines = {name: row["engine"] for name, row in found.items()}
    assert engines == {
        "fp16": "transformers",
        "gptq-int4": "gptqmodel",
        "gptq-int4@autogptq": "autogptq",
        "gptq-g32": "gptqmodel",
        "autogptq-int4": "autogptq",
        "autogptq-int4@gptqmodel": "gptqmodel",
    }
    for one, other in (("gptq-int4", "gptq-int4@autogptq"), ("autogptq-int4", "autogptq-int4@gptqmodel")):
        assert found[one]["perplexity"] == pytest.approx(found[other]["perplexity"], rel=1e-3)
        assert found[one]["artifact"]["files_sha256"] == found[other]["artifact"]["files_sha256"]
    assert (found["gptq-int4"]["group_size"], found["gptq-g32"]["group_size"]) == (128, 32)
    assert found["gptq-g32"]["bits_per_weight"] > found["gptq-int4"]["bits_per_weight"]
    assert found["gptq-g32"]["artifact"]["format"] == "gptq-g32"
    built = re.findall(
        r"^localrule artifact:\n(?:    .*\n)*?    wildcards: model=demo, artifact=([\w-]+)", said, re.MULTILINE
    )
    assert set(built) - {"autogptq-int4"} == {"gptq-g32"}  # the slow tests' demo holds auto-gptq's already
