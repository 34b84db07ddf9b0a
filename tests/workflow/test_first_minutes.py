"""What a reader sees of a run: cheap rows first, a page that fills, and a terminal that says how far it is."""

import json
import logging
import os
import pty
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import REPO
from snakemake_interface_logger_plugins.common import LogEvent
from workflows import LATENCY, SNAKEMAKE, study

from quantmill.report import summary
from quantmill.report.live_page import LivePage

sys.path.insert(0, str(REPO / "scripts/terminal"))
from snakemake_logger_plugin_quantmill import Progress, last_line

NO_OP_SECONDS = 5  # of a processor


class Run(NamedTuple):
    """A study of the demo, followed at a terminal."""

    root: Path
    options: list[str]
    terminal: str
    pages: list[dict[str, Any]]  # data of every page that was there while jobs ran
    absent: bool  # whether, after the first, there was ever none


def page_data(page: str) -> dict[str, Any]:
    """What a page's scripts show."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


@pytest.fixture(scope="module")
def first_run(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Run:
    """A model of random weights in two formats, the reference last; at a terminal."""
    root = checkout()
    text = "models: {small: {source: {random: demo/config.json}}}\nformats: [ct2-int8, fp16]\n"
    options = ["--cores", "2", *study(root, text + LATENCY)[2:]]  # so that jobs run one after the other
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": "scripts/terminal", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    command = [SNAKEMAKE, "--logger", "quantmill", *options]
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    said, pages, seen, absent = b"", [], None, False
    page = root / "artifacts/report/index.html"
    while True:
        if select.select([ours], [], [], 0.05)[0]:
            try:
                said += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        if not page.exists():
            absent |= seen is not None
            continue
        with page.open() as file:  # one file, though another may take its name meanwhile
            status = os.fstat(file.fileno())
            if status.st_ino != seen and status.st_mtime < 2:
                seen = status.st_ino
                pages.append(page_data(file.read()))
    assert process.wait() == 0, said.decode()
    return Run(root, options, said.decode(), pages, absent)


def starts(root: Path) -> list[str]:
    """Jobs in the order in which they began, from Snakemake's full log: rule, and the last wildcard."""
    (log,) = (root / ".snakemake/log").glob("*.log")
    blocks = re.findall(r"^(?:local)?rule (\w+):\n((?: {4}.*\n)*)", log.read_text(), re.M)
    found = []
    for rule, block in blocks:
        wildcards = re.search(r"wildcards: .*=(.*)", block)
        found.append(" ".join([rule, *([wildcards[1]] if wildcards else [])]))
    return found


def test_the_reference_is_measured_first(first_run: Run) -> None:
    order = starts(first_run.root)
    places = [order.index(job) for job in ("fp16 fp16", "latency fp16", "latency ct2-int8")]
    assert places == sorted(places)


def test_rows_come_before_builds_and_calibration_comes_last(call: Callable) -> None:
    planned = call(SNAKEMAKE, "-n", "--forceall", "report").stdout
    blocks = re.findall(r"^rule (\w+):\n((?: {4}.*\n)*)", planned, re.M)
    found = {rule: int(re.search(r"priority: (\d+)", block)[1]) if "priority" in block else 0 for rule, block in blocks}
    order = ["quality", "latency", "fp16", "ct2", "mlc", "quantize"]
    assert sorted(order, key=lambda rule: -found[rule]) == order
    assert len({found[rule] for rule in order}) == len(order)


def test_the_page_fills_while_jobs_run(first_run: Run) -> None:
    column = [column["name"] for column in first_run.pages[0]["columns"]].index("tokens_per_second")
    study = json.loads((first_run.root / "artifacts/report/study.json").read_text())
    whole = page_data((first_run.root / "artifacts/report/index.html").read_text())
    speeds = [
        {cell["format"]: row["values"][column] for cell, row in zip(study["cells"], page["rows"], strict=True)}
        for page in (first_run.pages[0], whole)
    ]
    assert speeds[0] == {"fp16": speeds[1]["fp16"], "ct2-int8": None}
    assert speeds[1]["fp16"] > 0 < speeds[1]["ct2-int8"]
    assert first_run.pages[0]["running"] == ["small/ct2-int8: latency"]
    assert whole["running"] == first_run.pages[0]["unfinished"] == []
    assert (first_run.root / "artifacts/logs/live-page.log").read_text() == ""


def test_a_browser_that_loads_the_page_again_always_finds_one(first_run: Run) -> None:
    assert first_run.pages
    assert not first_run.absent


def test_the_terminal_shows_jobs_and_ends_with_the_verdict_and_the_table(first_run: Run) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", first_run.terminal)  # without what erases the lines before
    lines = shown.replace("\r\n", "\n").split("\n")
    assert re.search(r"^\d+ of \d+ steps, \d+ s", first_run.terminal, re.M)
    assert re.search(r"^  latency small fp16, \d+ s", first_run.terminal, re.M)
    assert "reason: " not in first_run.terminal  # Snakemake's full log
    begin = max(place for place, line in enumerate(lines) if line.startswith("small: "))  # the verdict, whatever it is
    end = lines[begin:]
    assert [line.split()[0] for line in end[3:5]] == ["ct2-int8", "fp16"]
    assert "The report: artifacts/report/index.html" in end[:12]
    assert any(line.startswith("Complete log") for line in end)


def test_a_run_with_nothing_to_do_takes_less_than_five_seconds(first_run: Run) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([SNAKEMAKE, *first_run.options], cwd=first_run.root, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Nothing to be done" in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < NO_OP_SECONDS


def test_a_table_that_was_deleted_is_made_again(first_run: Run) -> None:
    table = first_run.root / "artifacts/report/results.csv"
    before = table.read_text()
    table.unlink()
    done = subprocess.run([SNAKEMAKE, *first_run.options], cwd=first_run.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table.read_text() == before


def record(event: LogEvent, **fields: Any) -> logging.LogRecord:
    """A record as Snakemake makes it."""
    made = logging.LogRecord("snakemake", logging.INFO, "", 0, "", (), None)
    made.__dict__ |= {"event": event, **fields}
    return made


def job_record(number: int, rule: str, name: str, *output: str) -> logging.LogRecord:
    return record(
        LogEvent.JOB_INFO, jobid=number, rule_name=rule, wildcards={"format": name}, log=[], output=list(output)
    )


def test_the_estimate_is_the_time_of_jobs_of_the_same_rule() -> None:
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


def test_a_job_shows_the_last_state_of_its_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"warning\r\n  0%|  | 0/9\r 44%|\xe2\x96\x88 | 4/9\x1b[A\r")
    assert last_line(str(log)) == "44%|\u2588 | 4/9"
    assert last_line(str(tmp_path / "none.log")) == ""


@pytest.mark.parametrize("rule", ["latency", "loads"])
def test_a_measurement_waits_for_the_page_that_is_being_made(tmp_path: Path, rule: str) -> None:
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
    """A row with what the summary reads; its interval of speed is 1% to both sides."""
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
def test_the_verdict_names_the_fastest_row_of_a_small_loss(others: list[dict[str, Any]], expected: str) -> None:
    assert summary.verdict([REFERENCE, *others], "fp16") == expected


def test_the_summary_is_a_dozen_lines_and_ends_with_the_page() -> None:
    results = {"config": {"reference": "fp16"}, "rows": [REFERENCE, *(row(f"f{n}", 50.0, 1.02) for n in range(20))]}
    lines = summary.text(results, "artifacts/report/index.html").split("\n")
    assert len(lines) <= 14
    assert lines[3].split() == ["fp16", "100", "40", "0.01", "8", "12", "MB"]
    assert lines[-3:] == ["and 13 more rows: see the page", "", "The report: artifacts/report/index.html"]
    assert all(len(line) <= 80 for line in lines)
