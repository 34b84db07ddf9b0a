"""Rows, ties, the Pareto front, and a page that shows hostile strings as text."""

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_results import cell, edit, whole_cell, window_losses

from quantmill.common.program import UserError
from quantmill.metrics import METRICS_VERSION
from quantmill.report import results
from quantmill.report.columns import COLUMNS
from quantmill.report.numbers import number

NAMES = [column.name for column in COLUMNS]


def collect(folder: Path, *cells: dict[str, Any]) -> dict[str, dict[str, Any]]:
    config = {"reference": "reference", "models": {"m": {}}}
    return {row["format"]: row for row in results.collect({"config": config, "cells": list(cells)})["rows"]}


def test_a_paired_difference_is_seen_through_noise(tmp_path: Path) -> None:
    rows = collect(
        tmp_path,
        cell(tmp_path, "reference", 10, window_losses(0)),
        cell(tmp_path, "worse", 10, window_losses(1)),
        cell(tmp_path, "same", 10, window_losses(0, wobble=0.5)),
    )
    worse = rows["worse"]["perplexity_ratio"]
    assert worse["ratio"] == pytest.approx(1.02020, abs=1e-5)  # exp(1 / 50), by words
    assert rows["worse"]["nll_difference"] == pytest.approx(1 / 100)  # by tokens
    assert rows["worse"]["nll_difference_low"] == pytest.approx(1 / 100)
    assert not worse["tie"]
    assert rows["same"]["perplexity_ratio"]["tie"]
    assert rows["same"]["nll_difference_low"] < 0 < rows["same"]["nll_difference_high"]
    assert {name: row["nll_verdict"] for name, row in rows.items()} == {
        "reference": "reference",
        "worse": "worse",
        "same": "tie",
    }
    assert rows["reference"]["perplexity_ratio"] == {"ratio": 1.0, "low": 1.0, "high": 1.0, "tie": True}


def test_divergences_below_and_above_the_noise_floor_differ(tmp_path: Path) -> None:
    rows = collect(
        tmp_path,
        cell(tmp_path, "reference", 10, window_losses(0), kld=0.0),
        cell(tmp_path, "below", 10, window_losses(0), kld=0.09),
        cell(tmp_path, "above", 10, window_losses(0), kld=0.11),
    )
    assert {name: row["above_noise_floor"] for name, row in rows.items()} == {
        "reference": False,
        "below": False,
        "above": True,
    }
    assert rows["below"]["kld_noise_floor"] == 0.001


def test_noise_floor_of_an_engine_of_likeliest_tokens(tmp_path: Path) -> None:
    def served(name: str, bound: float | None, **of_run: Any) -> dict[str, Any]:
        made = cell(tmp_path / name, name.partition(" ")[0], 10, window_losses(0.1))
        edit(made["quality"], lambda content: content["windows"].pop("kld"))
        edit(made["quality"], lambda content: content["summary"].update(kld_mean=None, kld_lower_bound=bound))
        of_run = {"run": name, "engine": "server"} | of_run
        for part in ("latency", "quality"):
            told = {"engine": of_run["engine"], "options": of_run.get("options", {})}
            edit(made[part], lambda content, told=told: content.update(told))
        return made | of_run

    cells = [
        cell(tmp_path, "reference", 10, window_losses(0), kld=0.0),
        served("reference served", 2e-6),
        served("reference of a cache of few bits", 3e-3, options={"cache": "fp8"}),
        served("below", 1e-6),
        served("above", 3e-6),
        served("silent", None),
        served("elsewhere", 1e-6, engine="other"),
    ]
    found = results.collect({"config": {"reference": "reference", "models": {"m": {}}}, "cells": cells})["rows"]
    assert {row["run"]: row["above_noise_floor"] for row in found if row["run"]} == {
        "reference served": False,
        "reference of a cache of few bits": True,
        "below": False,
        "above": True,
        "silent": None,
        "elsewhere": None,
    }
    verdicts = {row["run"]: row["nll_verdict"] for row in found}
    assert verdicts["reference served"] == verdicts["below"] == "tie" and verdicts["above"] == "worse"
    assert all(("above_noise_floor" in row["missing"]) == (row["above_noise_floor"] is None) for row in found)


def test_a_missing_noise_floor_says_why(tmp_path: Path) -> None:
    each = cell(tmp_path, "reference", 10, window_losses(0))
    reason = {"kind": "noise floor", "metrics_version": METRICS_VERSION, "summary": None, "reason": "one dtype"}
    Path(each["noise_floor"]).write_text(json.dumps(reason))
    row = collect(tmp_path, each)["reference"]
    assert row["kld_noise_floor"] is row["above_noise_floor"] is None
    assert row["missing"]["above_noise_floor"] == "one dtype"


@pytest.mark.parametrize(
    ("part", "lost", "kept"),
    [("latency", "tokens_per_second", "perplexity"), ("quality", "perplexity", "tokens_per_second")],
)
def test_a_part_without_figures_says_why(tmp_path: Path, part: str, lost: str, kept: str) -> None:
    each = cell(tmp_path, "reference", 10, window_losses(0))
    found = json.loads(Path(each[part]).read_text())
    names = ("kind", "metrics_version", "artifact", "protocol")
    told = {name: found[name] for name in names} | {"summary": None, "reason": "its engine tells none"}
    Path(each[part]).write_text(json.dumps(told))
    row = collect(tmp_path, each)["reference"]
    assert (row[lost], row["missing"][lost]) == (None, "its engine tells none")
    assert row[kept] == {"perplexity": 2, "tokens_per_second": 10}[kept]
    edit(f"{each['artifact']}/quantmill.json", lambda manifest: manifest["files"]["a"].update(sha256="34"))
    assert collect(tmp_path, each)["reference"]["missing"][lost].endswith("another build; run again")


def test_a_difference_within_the_noise_is_a_tie(tmp_path: Path) -> None:
    rows = collect(
        tmp_path,
        cell(tmp_path, "reference", 100, window_losses(0), kld=0.0),
        cell(tmp_path, "slower", 10, window_losses(-0.1), kld=0.09),
        cell(tmp_path, "other", 10, window_losses(-0.1), kld=0.11),
    )
    assert {
        name: (row["perplexity_ratio"]["tie"], row["nll_verdict"], row["pareto"]) for name, row in rows.items()
    } == {
        "reference": (True, "reference", True),
        "slower": (False, "tie", False),
        "other": (False, "better", True),
    }


@pytest.mark.parametrize(
    ("edited", "lost"),
    [
        ("another build", {"tokens_per_second", "perplexity"}),
        ("a failed build", {"tokens_per_second", "perplexity"}),
        ("new_tokens", {"tokens_per_second"}),
        ("perplexity", {"perplexity"}),
        ("evaluation text", {"perplexity"}),
        ("prompts text", {"tokens_per_second"}),
    ],
)
def test_results_from_before_an_edit_are_not_figures(tmp_path: Path, edited: str, lost: set[str]) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))
    edit(made["quality"], lambda quality: quality["protocol"].update(perplexity="gptq-2048"))
    for text, part, name in (("evaluation", "quality", "text"), ("prompts", "latency", "prompts")):
        edit(made[part], lambda result, name=name: result["protocol"].update({f"{name}_sha256": "x"}))
        made[text] = str(tmp_path / text)
        Path(made[text]).write_text('{"text_sha256": "x"}')
    edit(made["noise_floor"], lambda floor: floor["protocol"].update(text_sha256="x"))
    config = {"latency": {"new_tokens": 2, "decode": "captured"}, "perplexity": "gptq-2048"}
    row = results.make_row(made, config)
    assert (row["tokens_per_second"], row["perplexity"]) == (10, 2)
    why = f"was measured with another {edited}; run again"
    if edited == "another build":
        edit(f"{made['artifact']}/quantmill.json", lambda manifest: manifest["files"]["a"].update(sha256="34"))
        why = "was measured of another build; run again"
    elif edited == "a failed build":
        Path(made["artifact"], "quantmill.json").unlink()
        why = f"failed, or never ran: see {made['logs']['artifact'][0]}"
    elif edited.endswith("text"):
        Path(made[edited.split()[0]]).write_text('{"text_sha256": "of another one"}')
    else:
        config |= {"perplexity": "llamacpp-512"} if edited == "perplexity" else {"latency": {"new_tokens": 3}}
    row = results.make_row(made, config)
    for name in ("tokens_per_second", "perplexity"):
        assert (row[name] is None) == (name in lost)
        assert row["missing"].get(name) == (why if name in lost else None)
    assert (row["noise_floor"] is None) == (edited == "evaluation text")


def test_outdated_results_are_not_figures(tmp_path: Path) -> None:
    """It is there, and of the artifact that is there."""
    made = cell(tmp_path, "reference", 10, window_losses(0))
    assert results.make_row(made, {})["tokens_per_second"] == 10
    row = results.make_row(made | {"outdated": ["latency"]}, {})
    assert (row["tokens_per_second"], row["perplexity"]) == (None, 2)
    assert results.failures(row) == ["is older than the last edit; run again"]
    Path(made["logs"]["latency"][0]).write_text("error: the card fell off\n")
    assert results.failures(results.make_row(made | {"outdated": ["latency"]}, {})) == ["failed: the card fell off"]


def test_pareto_front_counts_ties_as_equal(tmp_path: Path) -> None:
    rows = collect(
        tmp_path,
        cell(tmp_path, "reference", 10, window_losses(0)),
        cell(tmp_path, "tied", 11, window_losses(0, wobble=0.5)),
        cell(tmp_path, "fast-worse", 30, window_losses(1)),
        cell(tmp_path, "slow-worse", 10, window_losses(1)),
        cell(tmp_path, "fast-much-worse", 31, window_losses(5)),
    )
    assert {name: row["pareto"] for name, row in rows.items()} == {
        "reference": True,
        "tied": True,
        "fast-worse": True,
        "slow-worse": False,
        "fast-much-worse": False,
    }


def test_what_was_not_measured_is_empty_and_says_why(tmp_path: Path) -> None:
    rows = collect(tmp_path, cell(tmp_path, "random", 10, None))
    assert rows["random"]["perplexity"] is None
    assert rows["random"]["pareto"] is None
    assert rows["random"]["missing"]["perplexity"] == "random weights"
    assert rows["random"]["missing"]["pareto"] == "random weights"
    results.write_csv(tmp_path / "r.csv", list(rows.values()))
    with (tmp_path / "r.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert list(line) == NAMES
    assert line["perplexity"] == line["pareto"] == line["nll_verdict"] == line["above_noise_floor"] == ""
    unmeasured = {name for name in NAMES if rows["random"][name] is None}
    assert unmeasured == set(rows["random"]["missing"])
    assert line["tokens_per_second"] == "10"
    assert line["interference"] == "none"


def test_what_disturbed_a_measurement_marks_its_row(tmp_path: Path) -> None:
    each = cell(tmp_path, "noisy", 10, None)
    path = Path(each["latency"])
    speed = json.loads(path.read_text()) | {"interference": ["a busy host (process 0)", "a busy host (process 1)"]}
    speed["summary"]["joules_per_token"] = None
    path.write_text(json.dumps(speed))
    row = collect(tmp_path, each)["noisy"]
    assert row["missing"]["joules_per_token"].startswith("the device does not report its energy")
    results.write_csv(tmp_path / "r.csv", [row])
    with (tmp_path / "r.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert line["interference"] == "a busy host (process 0); a busy host (process 1)"
    assert line["joules_per_token"] == ""


def test_columns_are_those_of_the_contract() -> None:
    assert ",".join(NAMES) == (
        "model,format,run,engine,device,bits_per_weight,size_bytes,perplexity,perplexity_low,perplexity_high,kld_mean,"
        "kld_median,kld_p99,top1_agreement,ttft_ms_p50,tpot_ms_p50,tpot_ms_p99,tokens_per_second,tokens_per_second_low,"
        "tokens_per_second_high,peak_memory_bytes,bandwidth_fraction,pareto,build_s,joules_per_token,interference,"
        "kld_lower_bound,kld_p999,kld_max,kld_noise_floor,above_noise_floor,delta_p_rms,nll_difference,nll_difference_low,"
        "nll_difference_high,nll_verdict,group_size,deployed_tokens_per_second,deployed_tokens_per_second_low,"
        "deployed_tokens_per_second_high"
    )


def test_results_of_another_metrics_version_are_refused(tmp_path: Path) -> None:
    each = cell(tmp_path, "old", 10, None)
    path = Path(each["latency"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics_version": METRICS_VERSION + 1}))
    with pytest.raises(UserError, match="measure again"):
        results.make_row(each, {})


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        *((None, 4, "\u2013"), (1.4e-7, 3, "0"), (0.0000123449, 3, "0.0000123"), (0.00097853, 3, "0.000979")),
        *((46.0308, 4, "46.03"), (3352.4, 3, "3352"), (100.0, 4, "100"), (1.00091, 5, "1.0009"), (-2.5, 3, "-2.5")),
    ],
)
def test_numbers_as_people_read_them(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("latency", "latency: is damaged"),
        ("npz", "quality.npz: is damaged"),
        ("positions", "quality.npz: holds 7 positions where the text has 250"),
    ],
)
def test_a_damaged_result_is_one_line(
    call: Callable, tmp_path: Path, tools_python: Path, damage: str, said: str
) -> None:
    made = cell(tmp_path, "reference", 10, window_losses(0))
    evaluation = {"ids": list(range(255)), "context": 51, "text_sha256": "x", "bytes": 1, "words": 1}  # five windows
    made["evaluation"] = str(tmp_path / "evaluation.json")
    Path(made["evaluation"]).write_text(json.dumps(evaluation))
    positions = Path(made["quality"]).with_suffix(".npz")
    count = 7 if damage == "positions" else 250
    np.savez(positions, kld=np.zeros(count), delta_p=np.zeros(count))
    broken = {"latency": Path(made["latency"]), "npz": positions}.get(damage)
    if broken:
        broken.write_bytes(broken.read_bytes()[:-40])
    config = {"reference": "reference", "models": {"m": {}}, "perplexity": "gptq-2048"}
    (tmp_path / "study.json").write_text(json.dumps({"config": config, "cells": [made], "options": "--cores 8"}))
    result = call(tools_python, "scripts/quantmill", "report.write", tmp_path / "study.json", tmp_path / "report")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert not (tmp_path / "report" / "index.html").exists()


def test_an_artifact_is_named_by_its_files(tmp_path: Path) -> None:
    row = collect(tmp_path, cell(tmp_path, "any", 10, None))["any"]
    assert "files" not in row["artifact"]
    printed = subprocess.run(["sha256sum"], input="ef  a\n12  b\n", capture_output=True, text=True, check=True).stdout
    assert row["artifact"]["files_sha256"] == printed.split()[0]


def test_the_page_holds_hostile_names_as_data(call: Callable, tmp_path: Path, tools_python: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    study = {
        "config": {"reference": "reference", "models": {hostile: {}}, "perplexity": "gptq-2048"},
        "cells": [
            {**whole_cell(tmp_path, "reference", 10, window_losses(0)), "model": hostile},
            {**whole_cell(tmp_path, "other", 20, window_losses(1)), "model": hostile},
        ],
        "options": "--cores 8",
    }
    path = Path(study["cells"][1]["latency"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"interference": [hostile]}))
    (tmp_path / "study.json").write_text(json.dumps(study))
    result = call(tools_python, "scripts/quantmill", "report.write", tmp_path / "study.json", tmp_path / "report")
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<script>alert(1)" not in page
    assert "\\u003c/script>\\u003cscript>alert(1)" in page
    assert page.count("<script") == page.count("</script>") == 3
    for name in ("quality-speed.svg", "quality-size.svg"):
        assert "other" in (tmp_path / "report" / name).read_text()
    assert (tmp_path / "report" / "quality-speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("lost", ["artifact", "latency", "quality", "noise_floor"])
def test_a_failed_part_leaves_cells_with_a_reason(tmp_path: Path, lost: str) -> None:
    cells = [cell(tmp_path, "reference", 10, window_losses(0)), cell(tmp_path, "broken", 20, window_losses(1))]
    path = Path(cells[1][lost])
    (path / "quantmill.json" if lost == "artifact" else path).unlink()
    log = Path(cells[1]["logs"][lost][0])
    log.write_text("10%\nerror: no room on the disk\n")
    columns = {"artifact": "size_bytes", "latency": "tokens_per_second", "quality": "kld_mean"}
    columns["noise_floor"] = "kld_noise_floor"
    for said, expected in (
        ("10%\nerror: no room on the disk\n", "failed: no room on the disk"),
        ("Traceback\n  File x\ntorch.OutOfMemoryError: too big\n", "failed: torch.OutOfMemoryError: too big"),
        ("10%\n", f"failed, or never ran: see {log}"),
    ):
        log.write_text(said)
        rows = collect(tmp_path, *cells)
        assert rows["broken"][columns[lost]] is None
        assert rows["broken"]["missing"][columns[lost]] == expected
        nulls = {name for name in NAMES if rows["broken"][name] is None}
        assert nulls == set(rows["broken"]["missing"])  # every empty cell has a reason, and no other
        assert rows["reference"]["tokens_per_second"] == 10
        results.write_csv(tmp_path / "r.csv", list(rows.values()))
