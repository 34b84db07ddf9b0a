"""The page of two runs: what its rows after are compared with, and what it shows of both."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_fixtures import Run
from whole_results import set_rate

from quantmill.report import merge_runs
from quantmill.report.labels import label


@pytest.mark.parametrize(("more", "verdict", "floor"), [(0.0, "tie", False), (0.5, "worse", None)])
def test_rows_after_are_compared_with_the_reference_before(
    before: Run, after: Run, more: float, verdict: str, floor: bool | None
) -> None:
    """A library that made everything worse by half a nat a token made its reference so too."""
    for row in after["rows"]:
        if row["quality_windows"]:
            row["above_noise_floor"] = False
            row["quality_windows"]["nll"] = [nll + more * 100 for nll in row["quality_windows"]["nll"]]
    found = {label(row): row for row in merge_runs.merge(before, after)["rows"] if row["model"] == "m"}
    assert (found["reference@before"]["nll_verdict"], found["reference@after"]["nll_verdict"]) == ("reference", verdict)
    assert found["reference@after"]["nll_difference"] == pytest.approx(more)
    assert found["int8@after"]["above_noise_floor"] is floor
    assert ("int8@before" in found["int8@after"]["dominated_by"]) == (more > 0)


def test_two_served_runs_keep_the_loads_of_both(before: Run, after: Run) -> None:
    load = {"model": "m", "format": "int8", "run": "server", "missing": {}, "output_tokens_per_second": 1.0}
    both = merge_runs.merge(before | {"loads": [load]}, after | {"loads": [load]})
    assert [each["run"] for each in both["loads"]] == ["server, before", "server, after"]
    assert "loads" not in merge_runs.merge(before, after)


def test_two_runs_stand_side_by_side_on_a_page(
    before: Run, after: Run, compare: Callable, call: Callable, tmp_path: Path, tools_python: Path
) -> None:
    set_rate(after["rows"][1], 100, 90, 110)
    without = compare(before, after)
    files = [tmp_path / "before.json", tmp_path / "after.json", "--page", tmp_path / "page.html"]
    result = call(tools_python, "scripts/quantmill", "report.compare", *files)
    assert (result.returncode, result.stdout, result.stderr) == (1, without.stdout, "")
    page = (tmp_path / "page.html").read_text()
    _, _, rest = page.partition('<script type="application/json" id="data">')
    data, _ = json.JSONDecoder().raw_decode(rest)
    names = [column["name"] for column in data["columns"]]
    rates = {row["label"]: row["values"][names.index("tokens_per_second")] for row in data["rows"]}
    assert (rates["int8@before"], rates["int8@after"]) == (200, 100)
    assert len(rates) == 6
    assert data["reference"] == "reference@before"
    dominated = {row["label"]: row["dominated by"] for row in data["rows"]}
    assert dominated["int8@before"] == []
    assert dominated["int8@after"] == ["reference@before", "int8@before", "reference@after"]  # as fast, and better
    (tmp_path / "page.html").unlink()
    result = call(sys.executable, "scripts/quantmill", "report.compare", *files)  # this environment draws no plots
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith("run envs/tools/bin/python instead\n")
    assert not (tmp_path / "page.html").exists()
