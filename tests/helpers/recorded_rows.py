"""The rows of results/, the shapes of their models, and what registered formats and engines are said to take."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from conftest import REPO

from quantmill.checkpoint import model_shape
from quantmill.plan.durations import load_rows
from quantmill.plan.jobs import RECORDED, Jobs
from quantmill.plan.resources import RunResources, costs_of

KNOWN = {  # parameters as transformers counts them
    "config/examples/llama-2-7b.json": 6_738_415_616,
    "config/examples/llama-1.1b.json": 1_100_048_384,
    "demo/config.json": 5_869_312,
}
ROWS = [row for row in load_rows(RECORDED) if not row.get("run") and not row.get("prebuilt")]
ENGINES = {row["format"]: row["engine"] for row in ROWS}
SAMPLES = {"samples": 128, "sequence_length": 2048}


def of_file(file: str | Path) -> model_shape.Shape:
    """Return the shape of a config.json."""
    return model_shape.of(json.loads((REPO / file).read_text()))


def of_row(row: dict[str, Any]) -> model_shape.Shape:
    """Return the shape of a recorded row's model, by its number of parameters."""
    return of_file(next(file for file, count in KNOWN.items() if count == row["artifact"]["parameter_count"]))


@cache
def list_jobs() -> dict[str, Any]:
    """Return Snakemake's plan of the demo's study (scripts/quantmill/plan/list_jobs.py)."""
    command = [REPO / ".venv/bin/python", REPO / "scripts/quantmill", "plan.list_jobs"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def jobs_of(device: str, **changes: Any) -> Jobs:
    """Return the demo's study on a device, with changes to its config."""
    formats = {name: costs_of(entry) for name, entry in list_jobs()["formats"].items()}
    engines = {name: entry and RunResources(**entry) for name, entry in list_jobs()["engines"].items()}
    study = list_jobs()["study"] | {"device": device} | changes
    return Jobs(study, tuple(list_jobs()["reference"]), formats, engines)
