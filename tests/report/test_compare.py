"""Regressions and other changes that report.compare finds, against changes that were put in."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from run_fixtures import Run
from whole_results import set_rate, window_losses

from quantmill.metrics import COMPARABLE, METRICS_VERSION
from quantmill.report import comparison
from quantmill.report.comparison import Limits, changes
from quantmill.report.numbers import MISSING

DEFAULT = Limits()


def verdicts(one: Run, other: Run, limits: Limits = DEFAULT) -> dict[str, str]:
    """Verdicts of the figures of int8, but those that are the same."""
    found = changes(one["rows"][1], other["rows"][1], limits)
    return {change.figure: change.verdict for change in found if change.verdict != "same"}


def test_a_run_is_the_same_as_itself(before: Run, compare: Callable) -> None:
    result = compare(before, before)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 2 + 3  # nothing below the table
    assert all(line.rstrip("| ").endswith("same") for line in lines[2:])
    assert len({len(line) for line in lines}) == 1


def test_noise_within_the_intervals_is_no_regression(before: Run, after: Run, compare: Callable) -> None:
    set_rate(after["rows"][1], 180, 160, 200)  # 10% slower, and both intervals are 10% wide
    result = compare(before, after)
    assert result.returncode == 0
    assert "-10.0% (" in result.stdout
    assert "WORSE" not in result.stdout


def test_slower_beyond_the_intervals_is_a_regression(before: Run, after: Run, compare: Callable) -> None:
    set_rate(after["rows"][1], 100, 90, 110)
    after["rows"][1]["versions"] = {"library": "2.0"}
    result = compare(before, after)
    assert result.returncode == 1
    assert "- WORSE: m, int8 (fake, d): tokens/s 200 → 100, -50.0% (" in result.stdout
    assert "also different: library None → 2.0" in result.stdout
    swapped = compare(after, before)
    assert swapped.returncode == 0
    assert "- better: m, int8 (fake, d): tokens/s 100 → 200, +100.0% (" in swapped.stdout


def test_what_nobody_minds_is_the_users_choice(before: Run, after: Run) -> None:
    set_rate(before["rows"][1], 200, 199.9, 200.1)
    set_rate(after["rows"][1], 192, 191.9, 192.1)
    after["rows"][1]["peak_memory_bytes"] = 1040
    assert verdicts(before, after) == {}
    assert verdicts(before, after, Limits(speed=0.03)) == {"tokens_per_second": "worse", "peak_memory_bytes": "worse"}


def test_a_median_counts_once_it_leaves_the_others_spread(before: Run, after: Run) -> None:
    for row in (before["rows"][1], after["rows"][1]):
        row |= {"ttft_ms_p50": 10.0}
        row["latency_summary"] |= {"ttft_ms_p50": 10.0, "ttft_ms_p90": 14.0}
    after["rows"][1]["ttft_ms_p50"] = 13.9
    assert verdicts(before, after) == {}
    after["rows"][1]["ttft_ms_p50"] = 14.1
    assert verdicts(before, after) == {"ttft_ms_p50": "worse"}
    assert verdicts(after, before) == {"ttft_ms_p50": "better"}


def test_quality_is_paired_by_windows(before: Run, after: Run) -> None:
    windows = after["rows"][1]["quality_windows"]
    windows["nll"] = [value + 1 for value in windows["nll"]]
    (change,) = [each for each in changes(before["rows"][1], after["rows"][1], DEFAULT) if each.verdict != "same"]
    assert (change.figure, change.verdict) == ("perplexity", "worse")
    assert change.amount == change.low == change.high == pytest.approx(math.exp(1 / 50) - 1)  # 50 words a window
    assert verdicts(after, before) == {"perplexity": "better"}
    assert verdicts(before, after, Limits(quality=0.03)) == {}


def test_quality_that_wavers_between_windows_is_the_same(before: Run, after: Run) -> None:
    after["rows"][1]["quality_windows"]["nll"] = window_losses(0.5 + 0.2, wobble=2.0)
    (change,) = [each for each in changes(before["rows"][1], after["rows"][1], DEFAULT) if each.figure == "perplexity"]
    assert change.amount == pytest.approx(math.exp(0.2 / 50) - 1)  # four times what nobody minds
    assert change.low < 0 < change.high
    assert verdicts(before, after) == {}


def test_divergence_is_paired_with_the_same_reference(before: Run, after: Run) -> None:
    row = after["rows"][1]
    row["quality_windows"]["kld"] = [1.5] * len(row["quality_windows"]["kld"])  # of 100 tokens each: 0.010 to 0.015
    found = {change.figure: change for change in changes(before["rows"][1], row, DEFAULT)}
    assert found["kld_mean"].amount == pytest.approx(0.005)
    assert verdicts(before, after) == {"kld_mean": "worse"}
    assert verdicts(before, after, Limits(quality=0.006)) == {}
    after["config"]["reference"] = "int8"
    (pair,) = [each for each in comparison.pairs(before, after, DEFAULT) if each.row["format"] == "int8"]
    assert {each.figure: each.note for each in pair.changes if each.verdict != "same"} == {
        "kld_mean": "another reference"
    }


def test_size_is_compared_to_the_byte(before: Run, after: Run, compare: Callable) -> None:
    after["rows"][1]["size_bytes"] += 1
    result = compare(before, after)
    assert result.returncode == 1
    assert "WORSE: size" in result.stdout
    assert "+1 B" in result.stdout
    assert compare(after, before).returncode == 0


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("quality", "text_sha256", "cd34", "another evaluation text"),
        ("quality", "perplexity", "llamacpp-512", "perplexity: gptq-2048 → llamacpp-512"),
        ("latency", "new_tokens", 100, "new_tokens: 200 → 100"),
    ],
)
def test_other_protocols_are_said_not_to_be_comparable(
    before: Run, after: Run, compare: Callable, kind: str, name: str, value: object, said: str
) -> None:
    row = after["rows"][1]
    row["protocol"][kind][name] = value
    row["quality_windows"]["nll"] = [1000.0] * len(row["quality_windows"]["nll"])
    result = compare(before, after)
    assert said in result.stdout
    if kind == "quality":
        assert result.returncode == 2
        assert "WORSE" not in result.stdout
    set_rate(row, 1, 1, 1)
    assert compare(before, after).returncode == 1  # a regression outweighs it


def test_files_that_someone_has_changed_are_no_regression(before: Run, after: Run, compare: Callable) -> None:
    after["rows"][1]["tokens_per_second_low"] = None
    result = compare(before, after)
    assert result.returncode == 2
    assert re.fullmatch(
        r"error: .*after\.json: rows\.1\.tokens_per_second_low: is null, and device is not "
        r"\(see results\.schema\.json\); make the report again\n",
        result.stderr,
    )


def test_more_repeats_measure_the_same(before: Run, after: Run) -> None:
    after["rows"][1]["protocol"]["latency"] |= {"repeats": 9, "processes": 9}
    assert verdicts(before, after) == {}


def test_a_row_is_matched_by_its_run(before: Run, after: Run, compare: Callable) -> None:
    for content, rate in ((before, 200), (after, 100)):
        other = json.loads(json.dumps(content["rows"][1])) | {"run": "vllm", "engine": "vllm"}
        set_rate(other, rate, rate - 1, rate + 1)
        content["rows"].insert(1, other)  # before the default run, which is the same in both
    after["rows"][1]["options"] = {"dtype": "float32"}
    result = compare(before, after)
    assert result.returncode == 1
    assert result.stdout.count("WORSE: m, ") == 1
    assert "- WORSE: m, int8@vllm (vllm, d): tokens/s 200 → 100, -50.0% (" in result.stdout
    assert "also different: options {} → {'dtype': 'float32'}" in result.stdout
    del after["rows"][1]
    assert "- GONE: m, int8@vllm (vllm, d): no such row" in compare(before, after).stdout


def test_a_vanished_row_is_a_regression(before: Run, after: Run, compare: Callable) -> None:
    del after["rows"][1]
    result = compare(before, after)
    assert result.returncode == 1
    assert "- GONE: m, int8 (fake, d): no such row" in result.stdout
    result = compare(after, before)
    assert result.returncode == 0
    assert "- new: m, int8 (fake, d)" in result.stdout


def test_a_failed_cell_loses_its_figures(before: Run, after: Run, compare: Callable) -> None:
    row = after["rows"][2]
    failed = [name for name in row if name.startswith(("ttft", "tpot", "tokens_per", "peak")) or name == "device"]
    row |= dict.fromkeys(failed) | {"interference": None, "latency_summary": None, "device_details": None}
    row["protocol"]["latency"] = None
    row["missing"] |= dict.fromkeys(failed, "out of memory")
    result = compare(before, after)
    assert result.returncode == 1
    assert f"- GONE: shape, random (fake, d): tokens/s 300 → {MISSING}: out of memory" in result.stdout
    assert "no such row" not in result.stdout
    assert compare(after, before).returncode == 0


def test_what_was_disturbed_is_said_and_counts_on_demand(before: Run, after: Run, compare: Callable) -> None:
    for rate in (200, 50):  # a disturbed speed that seems to be the same says as little
        set_rate(after["rows"][1], rate, 0.9 * rate, 1.1 * rate)
        after["rows"][1]["interference"] = ["a busy host (process 0)"]
        result = compare(before, after)
        assert result.returncode == 2
        assert f"- disturbed: m, int8 (fake, d): tokens/s 200 → {rate}\n" in result.stdout
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("| m ") and "int8" in line]
        assert line.split(" | ")[2].strip() == "disturbed"  # no ratio
    assert result.stdout.rstrip().endswith("  - meanwhile, after: a busy host (process 0)")
    assert compare(before, after, "--count-disturbed").returncode == 1
    after["rows"][1]["size_bytes"] += 1  # which nothing disturbs
    assert compare(before, after).returncode == 1


def test_what_cannot_be_compared_is_one_line(before: Run, after: Run, compare: Callable, tmp_path: Path) -> None:
    def refusal(one: Run, other: Run) -> str:
        result = compare(one, other)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        return line

    older = COMPARABLE[0] - 1
    assert f"metrics version {older}, not {METRICS_VERSION}" in refusal(before, after | {"metrics_version": older})
    assert "'rows' is a required property" in refusal({each: before[each] for each in before if each != "rows"}, after)
    assert "NaN" in refusal(before, after | {"schema_version": math.nan})
    for row in after["rows"]:
        row["device"] = "e"
    assert refusal(before, after).endswith("no row in common (one is of d, the other of e)")
    (tmp_path / "huge.json").write_text("[" + " " * 2**25)
    command = [
        sys.executable,
        "scripts/quantmill",
        "report.compare",
        str(tmp_path / "before.json"),
        str(tmp_path / "huge.json"),
    ]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.stderr.endswith("huge.json: is not JSON (over 32 MiB); name a results.json\n")
    command = [
        sys.executable,
        "scripts/quantmill",
        "report.compare",
        str(tmp_path / "before.json"),
        str(tmp_path / "nothing.json"),
    ]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}/nothing.json: No such file or directory\n"


def test_hostile_names_stay_in_their_cell(before: Run, compare: Callable) -> None:
    before["rows"][0]["model"] = "a|b\x1b[2J\nc"
    result = compare(before, before)
    assert result.returncode == 0
    assert "a\\|b\\x1b[2J\\nc" in result.stdout
