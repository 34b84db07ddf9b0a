"""Rows of results/, the shapes of their models, and the figures of registered formats and engines."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from conftest import REPO

from quantmill.checkpoint import model_shape
from quantmill.plan.jobs import Jobs
from quantmill.plan.resources import H200, BuildResources, Machine, RunResources, costs_of

KNOWN = {  # parameters as transformers counts them
    "config/examples/llama-2-7b.json": 6_738_415_616,
    "config/examples/llama-1.1b.json": 1_100_048_384,
    "demo/config.json": 5_869_312,
}
# SmolLM2-135M-Instruct's config.json, in part
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
SMOLLM2 |= {"max_position_embeddings": 8192}
# Where results were recorded. Products were measured later, on an H200 and on two quiet cores; an H100's has an H200's
# proportion to its copy
MACHINES = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": Machine(540e12, 3.0e12),
    "Intel(R) Xeon(R) Processor": Machine(150e9, 24e9),
    "AMD EPYC": Machine(150e9, 24e9),
}
STAND_INS = {"gptq-repeats": "gptq-int4", "exl3-random": "exl3-4.0bpw"}  # prebuilt, of random weights
STAND_INS |= {f"{name}-random": f"{name}-int4" for name in ("gptq", "awq")}
STAND_INS |= {f"{name}-random": f"ct-{name}" for name in ("w4a16", "w8a8", "fp8", "nvfp4", "nvfp4a16", "mxfp4")}


def of_file(file: str | Path) -> model_shape.Shape:
    """Return the shape of a config.json."""
    return model_shape.of(json.loads((REPO / file).read_text()))


def of_parameters(count: int) -> model_shape.Shape:
    """Return the shape of the recorded model with this number of parameters."""
    shapes = [model_shape.of(SMOLLM2), *map(of_file, KNOWN)]
    return next(shape for shape in shapes if shape.parameters == count)


def of_row(row: dict[str, Any]) -> model_shape.Shape:
    """Return the shape of a recorded row's model."""
    return of_parameters(row["artifact"]["parameter_count"])


def machine_of(row: dict[str, Any]) -> str:
    """Return the machine of a recorded row; for a row without a speed, that of its study's first row with one."""
    return (row["device_details"] or row["study"])["name"]


def device_of(row: dict[str, Any]) -> str:
    return "cuda" if "NVIDIA" in machine_of(row) else "cpu"


def _rows() -> list[dict[str, Any]]:
    rows = []
    for file in sorted(REPO.glob("results/*/results.json")):
        found = [row for row in json.loads(file.read_text())["rows"] if row.get("artifact")]
        study = next((row["device_details"] for row in found if row["device_details"]), {"name": "AMD EPYC"})
        rows += [row | {"study": study | {"of": file.parent.name}} for row in found]
    return [row | {"engine": row["engine"].replace("mlc", "quantmill-tvm")} for row in rows if not row.get("prebuilt")]


ALL = _rows()
ROWS = [row for row in ALL if not row.get("run")]
ENGINES = {row["format"]: row["engine"] for row in ROWS}


@cache
def list_jobs() -> dict[str, Any]:
    """Return the output of plan.list_jobs for the demo's study."""
    command = [REPO / ".venv/bin/python", REPO / "scripts/quantmill", "plan.list_jobs"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@cache
def figures() -> tuple[dict[str, BuildResources], dict[str, RunResources]]:
    """Figures of the registered formats and engines."""
    formats = {name: costs_of(entry) for name, entry in list_jobs()["formats"].items()}
    return formats, {name: RunResources(**entry) for name, entry in list_jobs()["engines"].items()}


def jobs_of(device: str, machine: Machine | None = None, **changes: Any) -> Jobs:
    """Return the jobs of the demo's study on a device, with changes to its config."""
    study = list_jobs()["study"] | {"device": device} | changes
    return Jobs(study, tuple(list_jobs()["reference"]), *figures(), machine)
