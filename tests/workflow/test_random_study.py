"""A study of random weights, followed at a terminal: the order of its jobs, its page meanwhile, and later edits."""

import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from workflows import LATENCY, SNAKEMAKE, page_data, plan_jobs, rows, study

NO_OP_SECONDS = 5  # of a processor
STUDY_OPTIONS = ("--cores", "8", "--configfile", "study.yaml")
SHAPE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
SHAPE |= {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


class Run(NamedTuple):
    """A study of the demo, followed at a terminal."""

    root: Path
    options: list[str]
    terminal: str
    pages: list[dict[str, Any]]  # data of every page that was there while jobs ran
    absent: bool  # whether, after the first, there was ever none


@pytest.fixture(scope="module")
def first_run(checkout: Callable[[], Path], torch_python: Path, tools_python: Path) -> Run:
    """Run a model of random weights in two formats, the reference last, at a terminal."""
    root = checkout()
    (root / "shape.json").write_text(json.dumps(SHAPE))
    text = "models: {shape: {source: {random: shape.json}}}\nformats: [ct2-int8, fp16]\n"
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
    places = [order.index(job) for job in ("artifact fp16", "latency fp16", "latency ct2-int8")]
    assert places == sorted(places)


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
    assert first_run.pages[0]["running"] == ["shape/ct2-int8: latency"]
    assert whole["running"] == first_run.pages[0]["unfinished"] == []
    assert (first_run.root / "artifacts/logs/live-page.log").read_text() == ""


def test_a_reloaded_page_is_always_there(first_run: Run) -> None:
    assert first_run.pages
    assert not first_run.absent


def test_the_terminal_ends_with_the_verdict(first_run: Run) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", first_run.terminal)  # without what erases the lines before
    lines = shown.replace("\r\n", "\n").split("\n")
    assert re.search(r"^\d+ of \d+ steps, \d+ s", first_run.terminal, re.M)
    assert re.search(r"^  latency shape fp16, \d+ s", first_run.terminal, re.M)
    assert "reason: " not in first_run.terminal  # Snakemake's full log
    begin = max(place for place, line in enumerate(lines) if line.startswith("shape: "))  # the verdict, whatever it is
    end = lines[begin:]
    assert [line.split()[0] for line in end[3:5]] == ["ct2-int8", "fp16"]
    assert "The report: artifacts/report/index.html" in end[:12]
    assert any(line.startswith("Complete log") for line in end)


def test_a_run_without_jobs_is_short(first_run: Run) -> None:
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


@pytest.fixture
def random_study(first_run: Run) -> Path:
    """Return the finished study; a test that changes it restores it."""
    return first_run.root


def test_random_weights_are_measured_for_speed_only(random_study: Path) -> None:
    root = random_study
    assert not (root / "envs/torch").exists()  # interpreters: replaces the workflow's own environments
    table = rows(root)
    assert all(float(row["tokens_per_second"]) > 0 for row in table.values())
    assert float(table["fp16"]["bits_per_weight"]) == pytest.approx(16, rel=0.02)
    assert float(table["ct2-int8"]["bits_per_weight"]) == pytest.approx(8, rel=0.1)  # no two tensors are stored as one
    assert all(row["perplexity"] == row["kld_mean"] == row["pareto"] == "" for row in table.values())
    results = json.loads((root / "artifacts/report/results.json").read_text())
    assert {row["missing"]["perplexity"] for row in results["rows"]} == {"random weights: measured for speed only"}
    assert "measured for speed only" in (root / "artifacts/report/index.html").read_text()


@contextmanager
def keep_files(*paths: Path) -> Iterator[None]:
    """Files that have their content and times again afterwards, by which Snakemake goes."""
    before = {path: (path.read_bytes(), path.stat()) for path in paths}
    try:
        yield
    finally:
        for path, (content, status) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_page_measures_disturbed_rows_again(
    random_study: Path, call: Callable, tools_python: Path, tmp_path: Path
) -> None:
    said = {"fp16": [], "ct2-int8": ["a neighbour"]}  # whatever disturbed this machine
    paths = {random_study / f"artifacts/shape/latency/{name}.json": interference for name, interference in said.items()}
    with keep_files(*paths):
        for path, interference in paths.items():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"interference": interference}))
        made = call(
            tools_python, "scripts/quantmill", "report.write", "artifacts/report/study.json", tmp_path, cwd=random_study
        )
        assert made.returncode == 0, made.stderr
    command = page_data((tmp_path / "index.html").read_text())["commands"]["disturbed"]
    name, *options = shlex.split(command)
    assert name == "snakemake"
    assert options[-1] == "artifacts/shape/latency/ct2-int8.json"
    assert "--configfile study.yaml" in command
    assert plan_jobs(call, random_study, "report", *STUDY_OPTIONS) == []
    assert plan_jobs(call, random_study, *options) == [
        "latency artifacts/shape/latency/ct2-int8.json",
        "page artifacts/report/index.html",
    ]


def test_an_incomplete_page_is_made_again(random_study: Path, call: Callable, tools_python: Path) -> None:
    report = random_study / "artifacts/report"
    with keep_files(*report.iterdir()):
        command = [tools_python, "scripts/quantmill", "report.write", "--incomplete", report / "study.json", report]
        made = subprocess.run(command, cwd=random_study, input="[]", capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        for target in ("report", "artifacts/report/index.html"):
            assert plan_jobs(call, random_study, target, *STUDY_OPTIONS) == ["page artifacts/report/index.html"]


def test_old_rows_are_not_current_after_failures(random_study: Path, call: Callable, tmp_path: Path) -> None:
    """Its weights cannot be made, and what was built and measured of the others lies there."""
    root = shutil.copytree(random_study, tmp_path / "edited", symlinks=True)
    (root / "shape.json").write_text('{"model_type": "nothing that is known"}')
    result = call(SNAKEMAKE, "report", *STUDY_OPTIONS, cwd=root)
    assert result.returncode == 1
    assert "Not complete: 2 of 2 formats failed." in result.stderr.splitlines()
    found = json.loads((root / "artifacts/report/results.json").read_text())
    assert [row["tokens_per_second"] for row in found["rows"]] == [None, None]
    assert {row["missing"]["size_bytes"].split(": ")[0] for row in found["rows"]} == {"failed"}
    assert (root / "artifacts/shape/latency/fp16.json").exists()
    assert len(page_data((root / "artifacts/report/index.html").read_text())["unfinished"]) == 3


def test_limited_addresses_leave_a_page_without_plots(random_study: Path, tools_python: Path, tmp_path: Path) -> None:
    limit = 8 * 10**9  # bytes, as a batch system would set it
    command = [tools_python, "scripts/quantmill", "report.write", "artifacts/report/study.json", tmp_path]
    made = subprocess.run(
        command,
        cwd=random_study,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert made.returncode == 0, made.stderr
    (line,) = made.stderr.splitlines()
    assert "the plots could not be drawn" in line
    assert "a limit (ulimit -v) allows 8 GB" in line
    report = random_study / "artifacts/report"
    for name in ("results.json", "results.csv"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()
    assert (tmp_path / "results.parquet").read_bytes()[:4] == b"PAR1"
    for name in ("quality-speed.svg", "quality-size.svg"):
        said = " ".join(ElementTree.parse(tmp_path / name).getroot().itertext())
        assert "The plot could not be drawn." in said
        assert "ulimit -v" in said
    assert (tmp_path / "quality-speed.png").read_bytes().startswith(b"\x89PNG")
    page = page_data((tmp_path / "index.html").read_text())
    assert "ulimit -v" in page["undrawn"]
    assert page["plots"] == page["detail plots"] == {}
    assert page_data((report / "index.html").read_text())["undrawn"] is None


def test_a_repointed_link_builds_again(random_study: Path, call: Callable, tmp_path: Path) -> None:
    root = shutil.copytree(random_study, tmp_path / "linked", symlinks=True)
    for link, folder in (("weights", "demo"), ("theirs", "artifacts/shape/ct2-int8")):
        for number in (1, 2):
            copy = shutil.copytree(root / folder, root / f"{link}-{number}")
            os.utime(copy / "config.json", (number, number))  # seconds since 1970
        (root / link).symlink_to(f"{link}-1")
    models = "linked: {source: {path: weights}}, "
    models += "shape: {source: {random: shape.json}, prebuilt: {theirs: {layout: ct2, path: theirs}}}"
    study(root, f"models: {{{models}}}\nformats: [fp16]\n" + LATENCY)
    targets = [*STUDY_OPTIONS, "--", "artifacts/linked/source", "artifacts/shape/theirs"]
    result = call(SNAKEMAKE, *targets, cwd=root)
    assert result.returncode == 0, result.stderr
    assert plan_jobs(call, root, *targets) == []
    for link in ("weights", "theirs"):
        (root / link).unlink()
        (root / link).symlink_to(f"{link}-2")
    assert plan_jobs(call, root, *targets) == ["prebuilt artifacts/shape/theirs", "source artifacts/linked/source"]
