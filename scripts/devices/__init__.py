"""The device that a measurement runs on: which one, what it is called, how fast its memory is.

Nothing here needs an engine's libraries: CUDA is asked through the driver's own library and NVML.
"""

from typing import Any

from common.program import UserError
from devices import card, cpu, cuda

CHOICES = ("auto", "cpu", "cuda")


def resolve(choice: str, hold: bool = True) -> str:
    """`cpu` or `cuda` for a choice of the config.

    With `hold`, a GPU is then this job's alone (`devices.card`). Raises `UserError` for a GPU that is not there.
    """
    if choice not in CHOICES:
        raise UserError(f"device {choice!r}: unknown; one of {', '.join(CHOICES)}")
    if choice == "cpu":
        return choice
    if hold:
        card.hold()
    missing = cuda.why_missing()
    if choice == "cuda" and missing:
        raise UserError(f"device cuda is not there: {missing}; set device: cpu, or auto")
    if hold and not missing and cuda.count() > 1:
        raise UserError("CUDA was started before this job chose one of several GPUs; set CUDA_VISIBLE_DEVICES to one")
    return "cpu" if missing else "cuda"


def describe(device: str, threads: int) -> dict[str, Any]:
    """Name, memory, driver and the like, for the result file."""
    return {"device": device, **(cuda.describe() if device == "cuda" else cpu.describe(threads))}


def copy_bandwidth(device: str, threads: int) -> float:
    """Bytes a second, read and written, of a large copy in the device's memory (median of several)."""
    return cuda.copy_bandwidth() if device == "cuda" else cpu.copy_bandwidth(threads)
