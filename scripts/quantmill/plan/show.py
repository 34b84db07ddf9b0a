"""Print what a study takes before it runs: jobs, downloads, disk, memory, time.

    python scripts/quantmill plan.show [CONFIG] [--disk GB]

Snakemake's own Python lists the jobs that are left and the figures of formats and engines (plan.list_jobs). The rest
follows from each model's config.json, the only file that is fetched of a model of the hub. Disk counts weights and
reference logits. Copies of the user's files and of the hub's cache take no disk if the file system has reflinks;
artifacts share bytes that do not change. Times follow from this machine's speed, which a probe measures
(scripts/quantmill/plan/probe.py), without downloads and the building of environments. A format or engine that registers
no figures is unknown. The status is 1 where the disk cannot hold the study.
"""

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantmill import devices
from quantmill.common import program
from quantmill.common.program import UserError, parser, printable, run_child
from quantmill.plan import probe
from quantmill.plan.jobs import Jobs
from quantmill.plan.model_facts import Origin, origin
from quantmill.plan.model_source import CHECKOUT
from quantmill.plan.resources import RunResources, costs_of
from quantmill.plan.rows import ARTIFACTS, TORCH, Row, nearest_folder, peak, study_rows
from quantmill.report.labels import label
from quantmill.report.numbers import align

TORCH_PYTHON = CHECKOUT / "envs/torch/bin/python"
OTHERS = {"tokens": TORCH, "mlc_library": 15.0, "page": 10.0}  # seconds of each job without a row, by its rule
NUMBERS = range(2, 5)  # columns of the tables


def ask_snakemake(python: Path, config: Path | None) -> dict[str, Any]:
    """Run plan.list_jobs. Raises `UserError` with its last line if it fails."""
    command = [*program.command("plan.list_jobs", python), *([config] if config else [])]
    result = run_child(command, stdout=subprocess.PIPE)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["plan.list_jobs failed without a message"]
        raise UserError(lines[-1].removeprefix("error: "))
    return json.loads(result.stdout)


def hub_artifacts(model: Mapping[str, Any]) -> list[str]:
    """List prebuilt artifacts on the hub, whose sizes are unknown."""
    return [name for name, words in model["prebuilt"].items() if "hub" in words]


def most_gpus(listed: dict[str, Any], device: str) -> str:
    """Return the GPUs of the largest job, its cell, and the option that allows several."""
    left = set(listed["left"])
    cells = [
        each for each in listed["cells"] if left & {each["latency"], each["quality"], each["loads"], each.get("tasks")}
    ]
    cells += [
        each | {"run": None, "gpus": listed["build_gpus"][each["format"]]}
        for each in listed["cells"]
        if each["artifact"] in left and each["format"] in listed["build_gpus"]
    ]
    if device == "cpu" or not listed["left"]:
        return "0"
    most = max(cells, key=lambda each: each["gpus"], default={"gpus": 1})
    if most["gpus"] == 1:
        return "1"
    name = f"{most['model']}/{label(most)}"
    more = f"run with --resources gpu={most['gpus']} hub=2"  # which replaces the profile's list
    return f"{most['gpus']} ({name}); {more}"


def amount(nbytes: int | None) -> str:
    """Format bytes."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def minutes(seconds: Iterable[float | None]) -> str:
    """Format the minutes of several jobs; a `+` stands for unknown ones."""
    jobs = list(seconds)
    known = [each for each in jobs if each is not None]
    return f"{sum(known) / 60:.1f} min{' +' * (len(known) < len(jobs))}" if known or not jobs else "unknown"


def show(rows: list[Row], origins: dict[str, Origin], count: dict[str, int]) -> None:
    """Print models, what is left to make of them, and the number of jobs of each rule."""
    lines = [("model", "", "parameters", "weights", "to download")]
    for name, found in origins.items():
        weights = f"{'' if found.shape.exact else 'about '}{found.shape.parameters:,}" if found.shape else "unknown"
        lines.append((name, "", weights, amount(found.weight_bytes), amount(found.download if not found.why else None)))
    print(*align(lines, NUMBERS), sep="\n")
    for name, found in origins.items():
        if found.why:
            print(f"{name}: {printable(found.why)}")
    lines = [("model", "to make", "disk", "memory", "time")]
    for row in rows:
        memory = "unknown" if row.mb is None else f"{row.mb:,} MB"
        lines.append((row.model, row.name, amount(row.disk), memory, minutes(row.seconds)))
    print("", *(align(lines, NUMBERS) if rows else ["Nothing is left to make of the models."]), "", sep="\n")
    each = ", ".join(f"{number} {rule}" for rule, number in sorted(count.items()))
    print(f"jobs: {sum(count.values())} ({each})")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path, nargs="?", help="a study; the demo's config without one")
    arguments.add_argument("--disk", type=float, metavar="GB", help="disk to plan for; what is free, without it")
    arguments.add_argument("--snakemake-python", type=Path, default=Path(".venv/bin/python"))
    options = arguments.parse_args()

    listed = ask_snakemake(options.snakemake_python, options.config)
    study = listed["study"]
    if study["device"] == "auto":
        study["device"] = devices.resolve("auto", hold=False)
    machine, as_on = probe.measure(study["device"], Path(study["interpreters"].get("torch", TORCH_PYTHON)))
    costs = Jobs(
        study,
        tuple(listed["reference"]),
        {name: costs_of(entry) for name, entry in listed["formats"].items()},
        {name: RunResources(**entry) for name, entry in listed["engines"].items()},
        machine,
    )
    origins = {name: origin(model, ARTIFACTS / name) for name, model in study["models"].items()}
    rows = study_rows(listed, costs, origins)
    show(rows, origins, listed["jobs"])
    fetched = [f"artifacts/{name}/{each}" for name, model in study["models"].items() for each in hub_artifacts(model)]
    complete = all(not found.why for found in origins.values()) and not {*fetched} & {*listed["left"]}
    need, download = peak(rows, origins), sum(found.download for found in origins.values())
    free = int(options.disk * 1e9) if options.disk is not None else shutil.disk_usage(nearest_folder(ARTIFACTS)).free
    seconds = [each for row in rows for each in row.seconds]
    seconds += [each for rule, each in OTHERS.items() for _ in range(listed["jobs"].get(rule, 0))]
    unknown = {what: "at least " * any(getattr(row, what) is None for row in rows) for what in ("disk", "mb")}
    print(f"download: {'' if complete else 'at least '}{amount(download)}")
    print(f"disk at peak: {unknown['disk']}{amount(need)}, of {amount(free)} free")
    print(f"memory of the largest job: {unknown['mb']}{max((row.mb or 0 for row in rows), default=0):,} MB")
    print(f"GPUs of the largest job: {most_gpus(listed, study['device'])}")
    if any(row.gpu_mb for row in rows):
        largest = max(rows, key=lambda row: row.gpu_mb)
        print(f"GPU memory of the largest build: {largest.gpu_mb:,} MB ({largest.model}/{largest.name})")
    print(
        f"time, one job after another, device {study['device']}{as_on}: {minutes(seconds)}"
        f"{f' {seconds.count(None)} jobs of unknown time' if None in seconds else ''}"
    )
    if need > free:
        raise UserError(
            f"{nearest_folder(ARTIFACTS)}: the study takes {amount(need)} and {amount(free)} are free; free some disk "
            "or leave formats out"
        )
