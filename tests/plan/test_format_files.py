"""A file of rules/formats that forgets something costs one line, at parse time."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

FORMAT_FILE = """
FORMATS["copy16"] = Format(layout="hf", engine="transformers", env="tools", program="build.fp16")
"""


@pytest.fixture(scope="module")
def dry_run(call: Callable, checkout: Callable[[], Path]) -> Callable[[str], Any]:
    """Return what Snakemake prints for a study with the format of a rules/formats/copy.smk that holds this text."""
    root = checkout()

    def run(text: str) -> Any:
        (root / "rules/formats/copy.smk").write_text(text)
        snakemake = REPO / ".venv" / "bin" / "snakemake"
        return call(snakemake, "-n", "report", "--config", "formats=[fp16,ct2-int8,copy16]", cwd=root)

    return run


def test_an_emulating_engine_has_no_speed(call: Callable, checkout: Callable) -> None:
    """Of compressed-tensors unpacked by transformers; a run by vLLM has both."""
    root = checkout()
    (root / "study.yaml").write_text(
        "models: {demo: {source: demo}}\nformats: [fp16, ct-fp8]\ndevice: cpu\n"
        "runs: {vllm: {engine: vllm, formats: [ct-fp8]}}\n"
    )
    result = call(REPO / ".venv/bin/snakemake", "-n", "--configfile", "study.yaml", "--", "report", cwd=root)
    assert result.returncode == 0, result.stderr
    planned = re.findall(r"^    output: artifacts/demo/(latency|quality)/(\S+)\.json", result.stdout, re.MULTILINE)
    assert {name for kind, name in planned if kind == "latency"} == {"fp16", "ct-fp8@vllm"}
    assert {"fp16", "ct-fp8", "ct-fp8@vllm"} <= {name for kind, name in planned if kind == "quality"}


def test_a_format_file_that_forgets_nothing(dry_run: Callable[[str], Any]) -> None:
    result = dry_run(FORMAT_FILE)
    assert result.returncode == 0, result.stderr
    assert "artifacts/demo/quality/copy16.json" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        (
            'FORMATS["copy16"] = Format(layout="hf", engine="transformers", env="tools", program="build.fp16")',
            "",
            "config error: formats: unknown format 'copy16'; did you mean 'fp16'?",
        ),
        (
            'engine="transformers"',
            'engine="transformer"',
            "error: format 'copy16': no file registers its engine 'transformer'; did you mean 'transformers'?",
        ),
        (
            'layout="hf"',
            'layout="gguf"',
            "error: format 'copy16': its engine transformers does not load the layout 'gguf'; known: hf",
        ),
        (
            'env="tools"',
            'env="tolls"',
            "error: format 'copy16': the pins of its environment, envs/tolls.txt, are missing; did you mean 'tools'?",
        ),
        (
            "build.fp16",
            "build.fp61",
            "error: format 'copy16': there is no program 'build.fp61'; did you mean 'build.fp16'?",
        ),
        ('layout="hf"', 'layout="hff"', "error: format 'copy16': there is no layout 'hff'; did you mean 'hf'?"),
        ("engine=", "engin=", "error: rules/formats/copy.smk: Format has no field 'engin'; did you mean 'engine'?"),
        (
            ', engine="transformers"',
            "",
            "error: rules/formats/copy.smk: Format lacks 'engine'; write Format(layout=..., engine=..., env=..., "
            "program=...)",
        ),
        (
            'FORMATS["copy16"]',
            'FORMATS["Copy16"]',
            "error: format 'Copy16': a name is small letters, digits, '.', '_' and '-'; rename it",
        ),
    ],
)
def test_a_format_file_that_forgets_something(dry_run: Callable[[str], Any], right: str, wrong: str, line: str) -> None:
    assert right in FORMAT_FILE
    result = dry_run(FORMAT_FILE.replace(right, wrong))
    assert result.returncode == 1
    told = [text for text in result.stderr.splitlines() if text and not text.startswith(("Using ", "Config file "))]
    assert told == [line]
