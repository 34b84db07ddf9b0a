"""The device that a measurement runs on: which one, what it is called, how fast its memory is.

Nothing here needs an engine's libraries: CUDA is asked through the driver's own library and NVML.
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
    """`cpu` or `cuda` for a choice of the config.

    With `hold`, so many GPUs are then this job's alone (`devices.card`). Raises `UserError` for GPUs that are not
    there.
    """
    if choice not in CHOICES:
        raise UserError(f"device {choice!r}: unknown; one of {', '.join(CHOICES)}")
    if choice == "cpu" and gpus > 1:
        raise UserError(f"device cpu has no GPUs, and {gpus} are asked for; leave gpus out, or set device: cuda")
    if choice == "cpu":
        return choice
    if hold:
        gpu_lock.hold(gpus)
    missing = cuda.why_missing()
    if missing and (choice == "cuda" or gpus > 1):
        raise UserError(f"device cuda is not there: {missing}; set device: cpu, or auto")
    if hold and not missing and cuda.count() != gpus:
        raise UserError(
            f"CUDA sees {cuda.count()} GPUs where {gpus} are asked for; name so many in CUDA_VISIBLE_DEVICES"
        )
    return "cpu" if missing else "cuda"


def describe(device: str, threads: int) -> dict[str, Any]:
    """Name, memory, driver and the like, for the result file."""
    return {"device": device, **(cuda.describe() if device == "cuda" else cpu.describe(threads))}


def copy_bandwidth(device: str, threads: int) -> float:
    """Bytes a second, read and written, of a large copy in the device's memory (median of several)."""
    return cuda.copy_bandwidth() if device == "cuda" else cpu.copy_bandwidth(threads)
