"""The tables of README.md and results/*/README.md: written between markers, and found out when they drift."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SIX = ["format", "runs in", "tokens/s (95%)", "perplexity", "over the reference (95%, paired)", "size"]
BEGIN, END = "<!-- results/demo: by make readme -->\n", "<!-- end -->\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the recorded demo and a page that has its markers."""
    shutil.copytree(REPO / "results/demo", tmp_path / "results/demo")
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}{END}after\n")
    return tmp_path


def update(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPO / "scripts/update_readme.py", "page.md", "results/demo", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def rows(folder: Path) -> list[list[str]]:
    """The cells of the page's table, its heading first."""
    lines = (folder / "page.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_short_table_has_six_of_the_long_tables_columns(folder: Path) -> None:
    assert update(folder, "--short").returncode == 0
    heading, _, *short = rows(folder)
    assert heading == SIX
    assert update(folder).returncode == 0
    columns, _, *long = rows(folder)
    assert len(columns) > len(SIX)
    assert short == [[row[columns.index(name)] for name in SIX] for row in long]
    assert [row[0] for row in long][:2] == ["`fp16`", "`ct2-int8`"]
    text = (folder / "page.md").read_text()
    assert text.startswith(f"before\n{BEGIN}") and text.endswith(f"\n{END}after\n")


def test_an_engine_that_does_not_tell_what_it_reads(folder: Path) -> None:
    """On a GPU, where the share of the bandwidth is shown."""
    path = folder / "results/demo/results.json"
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["device_details"]["device"] = "cuda"
    content["rows"][1]["bandwidth_fraction"] = None
    path.write_text(json.dumps(content))
    result = update(folder)
    assert result.returncode == 0, result.stderr
    heading, _, first, second, *_ = rows(folder)
    place = heading.index("of the bandwidth")
    assert first[place].endswith("%") and not second[place].endswith("%")


def test_check_changes_nothing_and_fails_where_the_table_drifted(folder: Path) -> None:
    assert update(folder).returncode == 0
    assert update(folder, "--check").returncode == 0
    drifted = (folder / "page.md").read_text().replace("transformers", "transformer")
    (folder / "page.md").write_text(drifted)
    result = update(folder, "--check")
    assert result.returncode == 1
    assert result.stderr == "error: page.md: its tables are not what the runs measured; run make readme\n"
    assert (folder / "page.md").read_text() == drifted


def test_a_page_without_markers_is_one_line(folder: Path) -> None:
    (folder / "page.md").write_text("nothing\n")
    result = update(folder)
    assert result.returncode == 1
    assert result.stderr.startswith("error: page.md: lacks the markers ") and result.stderr.count("\n") == 1
    assert (folder / "page.md").read_text() == "nothing\n"
