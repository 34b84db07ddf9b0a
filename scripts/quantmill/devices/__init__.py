"""The device of a measurement: its choice, its description and its memory bandwidth.

No engine's libraries are needed: CUDA is queried through the driver's library and NVML.
"""

import argparse
from typing import Any

from quantmill.common.program import UserError
from quantmill.devices import cpu, cuda, gpu_lock

CHOICES = ("auto", "cpu", "cuda")


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add --device and --threads, which each program that calculates takes."""
    arguments.add_argument("--device", default="auto", help=", ".join(CHOICES))
    arguments.add_argument(
        "--threads",
        type=cpu.limit_threads,
        default=cpu.available_threads(),
        help="CPU threads; at most the processors that this process may use",
    )


def resolve(choice: str, hold: bool = True, gpus: int = 1) -> str:
    """Return `cpu` or `cuda` for a choice of the config. Raises `UserError` if the GPUs are missing.

    With `hold`, the job then has `gpus` GPUs for itself (`devices.gpu_lock`).
    """
    if choice not in CHOICES:
        raise UserError(f"device {choice!r}: unknown; one of {', '.join(CHOICES)}")
    if choice == "cpu" and gpus > 1:
        raise UserError(f"device cpu has no GPUs, but gpus is {gpus}; remove gpus, or set device: cuda")
    if choice == "cpu":
        return choice
    if hold:
        gpu_lock.hold(gpus)
    missing = cuda.why_missing()
    if missing and (choice == "cuda" or gpus > 1):
        raise UserError(f"device cuda is missing: {missing}; set device: cpu, or auto")
    if hold and not missing and cuda.count() != gpus:
        raise UserError(f"CUDA sees {cuda.count()} GPUs, but gpus is {gpus}; name {gpus} GPUs in CUDA_VISIBLE_DEVICES")
    return "cpu" if missing else "cuda"


def describe(device: str, threads: int) -> dict[str, Any]:
    """Describe the device for the result file: name, memory, driver and similar."""
    return {"device": device, **(cuda.describe() if device == "cuda" else cpu.describe(threads))}


def copy_bandwidth(device: str, threads: int) -> float:
    """Measure a large copy in the device's memory; return bytes per second, read plus written (median)."""
    return cuda.copy_bandwidth() if device == "cuda" else cpu.copy_bandwidth(threads)
