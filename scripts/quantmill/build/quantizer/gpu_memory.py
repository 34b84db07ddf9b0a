"""The memory that a build may use of each GPU, the placement that fits it, and what was used.

torch counts the memory of this process, without CUDA's own context.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quantmill.build.quantizer.calibration import Calibration
from quantmill.build.quantizer.placement import GB, WHOLE, Placement, Samples, choose
from quantmill.checkpoint import model_shape
from quantmill.common.program import UserError


@dataclass
class GpuMemory:
    """The placement of a build, the GPUs that it uses, and the bytes that it may use of each; None on a CPU.

    leaner: whether faster placements do not fit. limited: whether the user set a limit. predicted: bytes of
    each GPU. peaks: bytes that other processes of the build have reserved of theirs.
    """

    placement: Placement = WHOLE
    leaner: bool = False
    gpus: int = 1
    allowed: int | None = None
    limited: bool = False
    predicted: int = 0
    peaks: list[int] = field(default_factory=list)

    def enforce(self) -> None:
        """Have torch refuse this process more than the user allows. Other processes of the GPU are not concerned."""
        if not self.limited or self.allowed is None:
            return
        for gpu in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(gpu).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.allowed / total), gpu)

    def explain(self, error: str) -> str:
        """Return why a tool failed, in words that follow its name."""
        if self.allowed is not None and "out of memory" in error:
            return (
                f"needs more than the {self.allowed / GB:.1f} GB that it may use of a GPU, with {self.placement}; "
                f"{remedy(self.limited)}"
            )
        return f"cannot quantize it{f' with {self.placement}' if self.leaner else ''} ({error})"

    def facts(self) -> dict[str, Any]:
        """Return what the manifest says."""
        return {
            "weights": self.placement.weights,
            "activations": self.placement.activations,
            "batch": self.placement.batch,
            "gpus": self.gpus,
            "allowed_bytes": self.allowed,
            "predicted_bytes": self.predicted,
            "peak_bytes": max([peak(), *self.peaks]),
        }


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the GPUs of a build, and their memory that it may use."""
    arguments.add_argument("--gpus", type=int, default=1, help="GPUs that the tool may use, if it can use several")
    arguments.add_argument(
        "--gpu-memory-gb", type=float, help="of each GPU that the tool may use (default: what is free)"
    )


def prepare(tool: str, placements: Sequence[Placement], options: argparse.Namespace, samples: Calibration) -> GpuMemory:
    """Choose a tool's placement for a build. With `options.gpu_memory_gb`, limit the memory of this process.

    On a CPU the first placement holds. Raises `UserError` if the weights alone exceed the memory.
    """
    if options.device == "cpu" or not placements:
        return GpuMemory(placements[0] if placements else WHOLE)
    free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(options.gpus))
    limited = options.gpu_memory_gb is not None
    allowed = min(free, int(options.gpu_memory_gb * GB)) if limited else free
    model, available = model_shape.of_folder(options.src), options.gpus if samples.samples else 1
    given = Samples(sum(map(len, samples.samples)), samples.sequence_length)
    placement = choose(placements, model, given, allowed, available)
    least = placement.least_bytes(model, available)
    if least > allowed:
        raise UserError(
            f"{options.src}: {tool} holds {placement}, whose weights take {least / GB:.1f} GB, and it may use "
            f"{allowed / GB:.1f} GB of a GPU; {remedy(limited)}"
        )
    predicted = placement.gpu_bytes(model, given, available)
    leaner = placement != placements[0]
    gpu = GpuMemory(placement, leaner, placement.gpus(available), allowed, limited, predicted)
    gpu.enforce()
    return gpu


def remedy(limited: bool) -> str:
    """Return what a user can do about too little memory."""
    return f"take a GPU with more free memory{', or raise quantizers.gpu_memory_gb' if limited else ''}"


def peak() -> int:
    """Return the most bytes that this process has reserved of a GPU."""
    return max(torch.cuda.max_memory_reserved(gpu) for gpu in range(torch.cuda.device_count()))
