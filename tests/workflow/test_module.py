"""Quantmill as a module of another workflow, from another folder: docs/MODULE.md, followed to the letter."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

SNAKEMAKE = REPO / ".venv/bin/snakemake"
PROMPTS = 9  # config/prompts.txt: three on programming, three literary, three of arithmetic


@pytest.fixture
def folder(tmp_path: Path, torch_python: Path, tools_python: Path) -> Path:
    """Write the page's workflow into an empty folder, with this checkout as its `quantmill`."""
    page = (REPO / "docs/MODULE.md").read_text()
    for language, name in (("python", "Snakefile"), ("yaml", "config.yaml")):
        (text,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(text)
    (tmp_path / "quantmill").symlink_to(REPO)
    return tmp_path


def test_a_dry_run_plans_the_whole_demo(folder: Path, call: Callable) -> None:
    result = call(SNAKEMAKE, "-n", "-p", "--workflow-profile", "quantmill/profiles/default", cwd=folder)
    assert result.returncode == 0, result.stderr
    said = result.stdout + result.stderr
    planned = Counter(re.findall(r"^(?:local)?rule (\w+):$", said, re.MULTILINE))
    planned.pop("quantmill_environment", None)  # those that this checkout has not built yet
    jobs = Counter({"latency": 6, "quality": 5, "tokens": 3, "artifact": 6})
    jobs.update(["source", "tensors", "safetensors", "mlc_library", "expected_predictions"])
    jobs.update(["reference", "noise_floor", "study", "page"])
    assert planned == {"all": 1, "count_prompts": 1} | {f"quantmill_{name}": count for name, count in jobs.items()}
    places, programs = zip(*re.findall(r"(\S+/scripts/quantmill) (\w+\.\w+)", said), strict=True)
    assert {(folder / place).resolve() for place in places} == {REPO / "scripts/quantmill"}
    assert len(set(programs)) > 10


def test_a_users_rule_reads_the_modules_files(folder: Path, call: Callable) -> None:
    result = call(SNAKEMAKE, "--cores", "2", "prompts.txt", "artifacts/report/study.json", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert (folder / "prompts.txt").read_text().split() == [str(PROMPTS)]
    prompts = json.loads((folder / "artifacts/demo/tokens/prompts.json").read_text())["prompts"]
    assert len(prompts) == PROMPTS
    study = json.loads((folder / "artifacts/report/study.json").read_text())
    assert (folder / study["config"]["texts"]["prompts"]).samefile(REPO / "config/prompts.txt")
    assert not (folder / ".snakemake/metadata").is_symlink()  # the records are the main workflow's
    again = call(SNAKEMAKE, "-n", "prompts.txt", "artifacts/report/study.json", cwd=folder)
    assert "Nothing to be done" in again.stdout + again.stderr


def test_the_modules_config_fails_in_one_line(folder: Path, call: Callable) -> None:
    (folder / "config.yaml").write_text("quantmill: {models: {demo: {source: demo}}, format: [fp16]}\n")
    result = call(SNAKEMAKE, "-n", cwd=folder)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "config error: config: unknown key 'format'; did you mean 'formats'"
    )
    assert "Traceback" not in result.stderr
