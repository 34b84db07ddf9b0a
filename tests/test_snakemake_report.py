"""`snakemake --report`: every figure with its category and caption, made without a network."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

pytestmark = pytest.mark.xdist_group("demo")

NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there


def test_snakemakes_own_report_holds_every_figure_with_a_caption(demo: Path, call: Callable, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = call(REPO / ".venv/bin/snakemake", "--report", out, cwd=demo, HTTPS_PROXY=NOWHERE, HTTP_PROXY=NOWHERE)
    assert result.returncode == 0, result.stderr
    page = out.read_text()
    results, categories = (
        json.loads(re.search(rf'<script id="{name}">\s*var {name} = (.*?);\s*</script>', page, re.DOTALL)[1])
        for name in ("results", "categories")
    )
    assert {name: list(files.values()) for name, files in categories.items()} == {
        "Report": [["artifacts/report/index.html"]],
        "Figures": [["artifacts/report/quality-speed.svg"]],
        "Tables": [["artifacts/report/results.csv"]],
    }
    captions = {each["name"]: each["caption"] for each in results.values()}
    assert "no network" in captions["index.html"]
    assert "the two cannot be told apart" in captions["quality-speed.svg"]
    assert "results.schema.json" in captions["results.csv"]
    assert "system-message" not in page  # what docutils puts where it does not understand
    assert not re.search(r"""(?:src|href)=["']https?:""", page)
