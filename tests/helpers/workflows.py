"""The workflow run in a copy of the project, and what it made there."""

import csv
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import CHARACTERS, REPO

from quantmill.common import manifest

SNAKEMAKE = REPO / ".venv/bin/snakemake"
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))  # of tests of faults, kills and sharing; see docs/RELIABILITY.md
LATENCY = "latency: {new_tokens: 8, repeats: 1, processes: 1, prompt_tokens: []}\n"
SHORT = "texts: {evaluation: short.txt, prompts: two.txt}\n"
ONE_FORMAT = "models: {demo: {source: demo}}\nformats: [fp16]\n" + SHORT + LATENCY


def with_interpreters(text: str) -> str:
    """Return a config that names this checkout's environments."""
    interpreters = {env: str(REPO / f"envs/{env}/bin/python") for env in ("torch", "tools")}
    return f"{text}interpreters: {json.dumps(interpreters)}\n"


def study(root: Path, text: str) -> list[str]:
    """Write a config with this checkout's environments and the texts of `SHORT` into `root`; return its options."""
    (root / "short.txt").write_text((root / "config/evaluation.txt").read_text()[:CHARACTERS])
    (root / "two.txt").write_text("".join((root / "config/prompts.txt").read_text().splitlines(True)[:2]))
    (root / "study.yaml").write_text(with_interpreters(text))
    return ["--cores", "8", "report", "--configfile", "study.yaml"]


def study_of_demo(demo: Path, folder: Path, text: str) -> Path:
    """Copy the finished demo; replace the models and formats of its config by `text`."""
    root = shutil.copytree(demo, folder / "demo", symlinks=True)
    path = root / "config/config.yaml"
    kept = re.sub("^(models|formats):.*(\n  .*)*\n", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(kept + text)
    return root


def start(root: Path, *targets: str, **options: Any) -> subprocess.Popen[str]:
    """Start a workflow of the copy's study. A closed terminal and Ctrl-C end it, also in the background."""
    command = ["env", "--default-signal=HUP,INT", str(SNAKEMAKE), "--cores=8", *targets, "--configfile=study.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=root, **pipes, **options)


def run(root: Path, *targets: str) -> tuple[int, str]:
    """Run a workflow; return its exit code and output."""
    process = start(root, *targets)
    told, _ = process.communicate()
    return process.returncode, told


def wait_for(found: Callable[[], object], seconds: float = 300) -> None:
    """Wait until something is found; fail after that time."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.02)


def check_whole(folder: Path) -> dict[str, str]:
    """Check that an artifact's files have their manifest's hashes; return the hashes."""
    files = json.loads((folder / manifest.NAME).read_text())["files"]
    hashes = {name: manifest.sha256(folder / name) for name in files}
    assert hashes == {name: entry["sha256"] for name, entry in files.items()}
    return hashes


def check_artifacts(folder: Path) -> set[str]:
    """Check that all artifacts have exactly the files of their manifests; return their names."""
    found = [path.parent for path in folder.glob("demo/*/quantmill.json")]
    for artifact in found:
        there = {file.name for file in artifact.iterdir() if not file.name.startswith(".")}
        assert there == {*check_whole(artifact), manifest.NAME}
    assert not [path for path in folder.glob("demo/.*") if path.name != ".snakemake_timestamp"]
    return {artifact.name for artifact in found}


def jobs(call: Callable, root: Path, *options: str) -> set[str]:
    """Return the jobs of a dry run: rule names, with the format if there is one."""
    result = call(SNAKEMAKE, "-n", "report", *options, cwd=root)
    assert result.returncode == 0, result.stderr
    planned = set()
    for block in re.split(r"\n(?=\[|rule |localrule )", result.stdout + result.stderr):
        rule = re.search(r"^(?:local)?rule (\w+):", block, re.MULTILINE)
        wildcards = re.search(r"wildcards: (.*)", block)
        if rule:
            named = [
                part.split("=")[1] for part in (wildcards[1].split(", ") if wildcards else []) if "model=" not in part
            ]
            planned.add(" ".join([rule[1], *named]))
    return planned


def rows(root: Path) -> dict[str, dict[str, str]]:
    """Return the report's rows by format."""
    with (root / "artifacts/report/results.csv").open() as file:
        return {row["format"]: row for row in csv.DictReader(file)}


def plan_jobs(call: Callable, root: Path, *options: str) -> list[str]:
    """Return the rules of a dry run's jobs with their first output, except the target's."""
    result = call(SNAKEMAKE, "-n", *options, cwd=root)
    assert result.returncode == 0, result.stderr
    block = r"rule (\w+):\n(?:    .*\n)*?    output: ([^,\n]*?)(?: \(update\))?[,\n]"
    found = re.findall(block, result.stdout + result.stderr)
    return sorted(f"{rule} {output}" for rule, output in found)


def page_data(page: str) -> dict[str, Any]:
    """Return the data that a page's scripts show."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found[1]) if found else {}
