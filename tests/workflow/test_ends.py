"""The end of a Snakemake run: one line for the user's errors, and the same command always goes on."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import REPO
from workflows import SNAKEMAKE, check_artifacts, run, start, wait_for, with_interpreters

TARGETS = ["artifacts/demo/bin", "artifacts/report/study.json"]
STUDY = "models: {demo: {source: demo}}\nformats: [fp16]\n"
SECONDS = 60  # until a run that was told to end has ended


@pytest.fixture(scope="module")
def clone(checkout: Callable[[], Path], tools_python: Path) -> Path:
    """Copy the project; nothing is made in the copy."""
    clone = checkout()
    (clone / ".venv").symlink_to(REPO / ".venv")
    return clone


@pytest.fixture
def root(clone: Path) -> Path:
    """Write a study into it."""
    (clone / "study.yaml").write_text(with_interpreters(STUDY))
    return clone


@pytest.fixture
def slow(checkout: Callable[[], Path], tools_python: Path) -> Path:
    """Copy the project with a study whose jobs make a file `begun`, and wait for one `quick`."""
    root = checkout()
    python = root / "slow python"
    python.write_text(
        f'#!/bin/sh\ntouch "{root}/begun"\nuntil [ -e "{root}/quick" ]; do sleep 0.1; done\nexec {tools_python} "$@"\n'
    )
    python.chmod(0o755)
    (root / "study.yaml").write_text(with_interpreters(STUDY).replace(str(tools_python), str(python)))
    return root


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("artifacts/demmo/fp16", "No rule to produce artifacts/demmo/fp16 "),
        ("artifacts/demmo/tokens/evaluation.json", "No rule to produce artifacts/demmo/tokens/evaluation.json "),
        ("artifacts/demmo/latency/fp16.json", "No rule to produce artifacts/demmo/latency/fp16.json "),
        ("artifacts/demmo/quality/noise-floor.json", "No rule to produce artifacts/demmo/quality/noise-floor.json "),
        ("artifacts/demo.bak/gguf-q4_k_m", "No rule to produce artifacts/demo.bak/gguf-q4_k_m "),
        ("artifacts/demo/latency/fp17.json", "error: artifacts/demo: no cell is called 'fp17'; did you mean 'fp16'?"),
        ("artifacts/texts/evaluation", "error: artifacts/texts/evaluation: the study takes no evaluation text from"),
    ],
)
def test_a_target_that_the_study_does_not_make(root: Path, target: str, line: str) -> None:
    code, told = run(root, "--dry-run", target)
    assert code == 1
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("models: {m: {source: {path: demmo}}}", "models.m.source: there is no folder demmo"),
        ("models: {m: {source: {random: demo/confg.json}}}", "models.m.source.random: demo/confg.json does not exist"),
        (STUDY + "texts: {evaluation: config/evaluaton.txt}", "texts.evaluation: config/evaluaton.txt does not exist"),
        (STUDY + "interpreters: {tools: /opt/pyhton}", "interpreters.tools: /opt/pyhton is not a program"),
        (STUDY + "llama_cpp: /opt/lama.cpp", "llama_cpp: there is no folder /opt/lama.cpp; name a build of llama.cpp"),
        (
            "models: {m: {source: demo, prebuilt: {x: {path: x.guf, layout: gguf}}}}",
            "models.m.prebuilt.x: there is no folder or *.gguf file x.guf",
        ),
    ],
)
def test_a_path_of_the_config_that_leads_nowhere(root: Path, text: str, line: str) -> None:
    (root / "study.yaml").write_text(text)
    code, told = run(root, "--dry-run", "report")
    assert code == 1
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith(f"config error: {line}"), told


def test_a_folder_that_cannot_be_written(root: Path) -> None:
    command = f"mount --bind . . && mount -o remount,ro,bind . && cd $PWD && exec {SNAKEMAKE} --cores 1 report"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], cwd=root, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"nothing can be mounted here (root can): {done.stderr.strip()}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {root}: cannot be written")


@pytest.mark.parametrize("home", ["/proc/none", "/etc/passwd", None])
def test_make_needs_no_home(root: Path, home: str | None) -> None:
    (root / "study.yaml").write_text("models: {}\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"HOME": home} if home else {}
    command = ["make", "report", "--assume-old=.venv/.complete", "CONFIG=study.yaml", "CORES=1"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert any(line.startswith("config error: models") for line in done.stderr.splitlines()), done.stderr


def test_a_clone_at_an_odd_path_runs(checkout: Callable[..., Path], tools_python: Path, tmp_path: Path) -> None:
    clone, here = checkout(tmp_path / "a b$c'd\"é"), tmp_path / "here"
    here.mkdir()
    (here / "my study.yaml").write_text(with_interpreters(STUDY))
    options = ["--configfile", "my study.yaml", "--cores", "2", *TARGETS]
    command = [SNAKEMAKE, "--snakefile", clone / "Snakefile", *options]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_artifacts(here / "artifacts") == {"source", "safetensors", "bin"}


def test_every_word_of_a_shell_command_is_quoted() -> None:
    commands = 0
    for file in [REPO / "Snakefile", *(REPO / "rules").rglob("*.smk")]:
        text = file.read_text()
        for command in [
            *re.findall(r"^ +shell:\n(.*?)\n(?:\n|\Z)", text, re.M | re.S),
            *re.findall(r"^SCORING.*?^\)", text, re.M | re.S),
        ]:
            fields = set(re.findall(r"\{[^{}]*\}", command)) - {"{threads}"}
            assert fields and all(field.endswith(":q}") for field in fields), f"{file}: {command}"
            commands += 1
    assert commands > 20


@pytest.mark.parametrize(
    ("signals", "group"),
    [
        ([signal.SIGHUP], False),
        ([signal.SIGHUP], True),
        ([signal.SIGTERM], False),
        ([signal.SIGTERM], True),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGKILL], True),
    ],
    ids=["SIGHUP", "SIGHUP to all", "SIGTERM", "SIGTERM to all", "Ctrl-C twice", "SIGKILL to all"],
)
def test_the_same_command_goes_on(slow: Path, signals: list[signal.Signals], group: bool) -> None:
    process = start(slow, TARGETS[0], start_new_session=True)  # one job, which waits and does not start meanwhile
    wait_for((slow / "begun").exists)
    for number in signals:
        (os.killpg if group else os.kill)(process.pid, number)
    (slow / "quick").touch()
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "scripts/quantmill" not in "".join(re.findall(r'^ *File "(.*)", line', told, re.M))
    if len(signals) == 1:  # the second may interrupt Snakemake while it ends its jobs, and it shows where
        assert "Traceback" not in told
    code, told = run(slow, *TARGETS)
    assert code == 0, told
    assert check_artifacts(slow / "artifacts") == {"source", "safetensors", "bin"}


def test_a_signal_while_jobs_are_planned(slow: Path) -> None:
    process = start(slow, *TARGETS, start_new_session=True)
    wait_for((slow / ".snakemake/log").exists)
    os.kill(process.pid, signal.SIGTERM)
    (slow / "quick").touch()
    process.communicate(timeout=SECONDS)
    shutil.rmtree(slow / "artifacts", ignore_errors=True)
    code, told = run(slow, *TARGETS)
    assert code == 0, told


def test_profiles_use_the_greedy_scheduler() -> None:
    """Snakemake's handler of SIGTERM waits for that lock, and what it has interrupted holds it while it solves."""
    profile = yaml.safe_load((REPO / "profiles/default/config.v8+.yaml").read_text())
    assert profile["scheduler"] == "greedy"
    others = (REPO / "profiles").glob("*/config.v8+.yaml")
    assert not [each for each in others if yaml.safe_load(each.read_text()).get("scheduler", "greedy") != "greedy"]
