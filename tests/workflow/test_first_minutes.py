"""The user's view of a run: cheap rows first, progress at the terminal, and the summary."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from snakemake_interface_logger_plugins.common import LogEvent
from workflows import SNAKEMAKE

from quantmill.report import summary
from quantmill.report.live_page import LivePage

sys.path.insert(0, str(REPO / "scripts/terminal"))
from snakemake_logger_plugin_quantmill import Progress, last_line


def test_rows_come_before_builds_and_calibration_last(call: Callable) -> None:
    planned = call(SNAKEMAKE, "-n", "--forceall", "report").stdout
    blocks = re.findall(r"^rule (\w+):\n((?: {4}.*\n)*)", planned, re.M)
    found = {}
    for rule, block in blocks:
        artifact = re.search(r"artifact=(\S+)", block)
        priority = re.search(r"priority: (\d+)", block)
        name = f"{rule} {artifact[1]}" if artifact else rule
        found[name] = int(priority[1]) if priority else 0
    order = ["quality", "latency", "artifact fp16", "artifact ct2-int8", "artifact mlc-q4f16_1", "artifact gptq-int4"]
    assert sorted(order, key=lambda rule: -found[rule]) == order
    assert len({found[rule] for rule in order}) == len(order)


def record(event: LogEvent, **fields: Any) -> logging.LogRecord:
    """Make a record of Snakemake's logger."""
    made = logging.LogRecord("snakemake", logging.INFO, "", 0, "", (), None)
    made.__dict__ |= {"event": event, **fields}
    return made


def job_record(number: int, rule: str, name: str, *output: str) -> logging.LogRecord:
    return record(
        LogEvent.JOB_INFO, jobid=number, rule_name=rule, wildcards={"format": name}, log=[], output=list(output)
    )


def test_the_estimate_is_by_rule() -> None:
    progress = Progress(started=0.0)
    progress.hear(record(LogEvent.RUN_INFO, stats={"quality": 2, "latency": 3, "total": 5}), 0.0)
    assert progress.estimate(0.0) is None
    clock = 0.0
    for number, (rule, seconds) in enumerate(
        [("quality", 5.0), ("latency", 20.0), ("quality", 5.0), ("latency", 30.0)]
    ):
        progress.hear(job_record(number, rule, "fp16"), clock)
        clock += seconds
        progress.hear(record(LogEvent.JOB_FINISHED, job_id=number), clock)
    assert progress.lines(clock, 80) == ["4 of 5 steps, 1 min 0 s; about 25 s to go"]  # a latency job took 25 s
    progress.hear(job_record(9, "latency", "ct2-int8"), clock)
    assert progress.lines(clock + 10, 80)[0] == "4 of 5 steps, 1 min 10 s; about 15 s to go"
    assert progress.lines(clock + 10, 80)[1] == "  latency ct2-int8, 10 s"


def test_a_job_shows_its_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"warning\r\n  0%|  | 0/9\r 44%|\xe2\x96\x88 | 4/9\x1b[A\r")
    assert last_line(str(log)) == "44%|\u2588 | 4/9"
    assert last_line(str(tmp_path / "none.log")) == ""


@pytest.mark.parametrize("rule", ["latency", "loads"])
def test_a_measurement_waits_for_the_page(tmp_path: Path, rule: str) -> None:
    slow = "import json, sys, time; text = sys.stdin.read(); time.sleep(1); open(sys.argv[1], 'w').write(text)"
    rows = [{"artifact": f"{name}", "latency": f"{name}.json", "quality": None} for name in ("a", "b", "c")]
    target = tmp_path / "page"
    command = [sys.executable, "-c", slow, target]
    page = LivePage(command, lambda: True, rows, ["a.json", "b.json", "c", "c.json", "page"], tmp_path / "log")
    page.emit(job_record(1, "latency", "a", "a.json"))
    page.emit(record(LogEvent.JOB_FINISHED, job_id=1))  # the row of a is whole
    page.emit(job_record(2, "build", "c", "c"))
    assert not target.exists()  # a build does not wait
    before = time.monotonic()
    page.emit(job_record(3, rule, "b", "b.json"))
    assert json.loads(target.read_text()) == ["b.json", "c", "c.json", "page"]
    assert 0.5 < time.monotonic() - before < 30
    page.close()


def row(format: str, speed: float, ratio: float, **others: Any) -> dict[str, Any]:
    """Make a row with the fields of the summary; its interval of speed is 1% to both sides."""
    interval = {"ratio": ratio, "low": ratio - 0.001, "high": ratio + 0.001, "tie": abs(ratio - 1) < 0.001}
    ends = {
        f"deployed_tokens_per_second{end}": speed * share for end, share in (("", 1), ("_low", 0.99), ("_high", 1.01))
    }
    figures = {"perplexity": 40 * ratio, "kld_mean": 0.01, "bits_per_weight": 8.0, "size_bytes": 12_000_000}
    state = {"model": "m", "device": "cpu", "interference": [], "pareto": True, "above_noise_floor": True}
    state |= {"artifact": None}
    return {
        "format": format,
        "tokens_per_second": speed,
        "perplexity_ratio": interval,
        **ends,
        **figures,
        **state,
    } | others


REFERENCE = row("fp16", 100.0, 1.0, above_noise_floor=False)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([row("int8", 200.0, 1.005)], "fastest at no more than 1% loss: int8, 200 tokens/s; perplexity +0.5%"),
        ([row("int4", 300.0, 1.02)], "fastest at no more than 1% loss: fp16, 100 tokens/s; the reference"),
        (
            [row("int8", 101.0, 1.005)],
            "fastest at no more than 1% loss: int8, 101 tokens/s; perplexity +0.5%"
            " (as fast, as far as can be told: fp16)",
        ),
        (
            [row("int8", 200.0, 1.005, interference=["other programs"])],
            "fastest at no more than 1% loss: int8, at least 198 tokens/s; perplexity +0.5%",
        ),
        (
            [row("int8", 50.0, 1.005, interference=["other programs"])],
            "fastest at no more than 1% loss: fp16, 100 tokens/s; the reference (disturbed, perhaps faster: int8)",
        ),
        (
            [row("own", 200.0, 1.005, deployed_tokens_per_second=None)],
            "fastest at no more than 1% loss: fp16, 100 tokens/s; the reference",
        ),
        (
            [row("int8", 200.0, 1.005, artifact={"gate": {"faithful": {"unchecked": "nothing reads it"}}})],
            "fastest at no more than 1% loss: fp16, 100 tokens/s; the reference",
        ),
    ],
)
def test_the_verdict_names_the_fastest_small_loss(others: list[dict[str, Any]], expected: str) -> None:
    assert summary.verdict([REFERENCE, *others], "fp16") == expected


def test_the_summary_is_short_and_names_the_page() -> None:
    results = {"config": {"reference": "fp16"}, "rows": [REFERENCE, *(row(f"f{n}", 50.0, 1.02) for n in range(20))]}
    lines = summary.text(results, "artifacts/report/index.html").split("\n")
    assert len(lines) <= 14
    assert lines[3].split() == ["fp16", "100", "40", "0.01", "8", "12", "MB"]
    assert lines[-3:] == ["and 13 more rows: see the page", "", "The report: artifacts/report/index.html"]
    assert all(len(line) <= 80 for line in lines)
