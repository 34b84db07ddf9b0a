"""The experts of a mixture: how many calibration tokens each saw, and those that a tool left unquantized."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmill.checkpoint import EXPERT_PARTS, shards
from quantmill.checkpoint.float16 import CAST
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import program
from quantmill.common.program import UserError, printable, run_child
from quantmill.layouts.stacked import STACKED

FLOATS = CAST | {"F16"}


def facts(tokens: Mapping[str, Sequence[int]], width: int) -> dict[str, Any]:
    """Return what the manifest says of a mixture's experts.

    Args:
        tokens: calibration tokens of each expert, by the name of its layer.
        width: numbers that an expert reads of a token. With fewer tokens than that, the matrix of their second moments,
            by which GPTQ rounds, is singular.

    `below` is the number of experts with fewer than `few` tokens, and `unreached` are the names of those without any.
    """
    each = [(f"{layer}.{number}", count) for layer, counts in tokens.items() for number, count in enumerate(counts)]
    return {
        "count": len(each),
        "few": width,
        "below": sum(count < width for _, count in each),
        "unreached": [name for name, count in each if not count],
        "tokens": {layer: list(counts) for layer, counts in tokens.items()},
    }


def count(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the `facts` of a mixture's calibration, or why they are unknown.

    This runs in a process of its own, whose memory is free again before the tool starts.
    """
    out = work / "experts.json"
    words = ("calibration", "evaluation", "samples", "sequence_length", "seed", "device", "threads")
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in words]
    result = run_child([*program.command("build.count_experts", options.gate_python), options.src, out, *flags])
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it was killed; memory short?"])[-1]
        return {"unknown": printable(last.removeprefix("error: "))}
    found = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def are_stacked(folder: Path) -> bool:
    """Return whether a model's files hold all experts of a layer in one tensor, as gpt-oss is published."""
    return any(STACKED.fullmatch(name) for name in shards.find(folder).tensors())


def check_quantized(tool: str, tensors: Iterable[Tensor], folder: Path) -> None:
    """Raise `UserError` if a tool left matrices of experts in 16 or 32 bits.

    transformers 5 stacks a layer's experts in one tensor [experts, …], and tools that replace linear layers pass over
    it without a word. Experts are most of a mixture's weights.
    """
    every = list(tensors)
    kept = [tensor for tensor in every if _is_matrix_of_experts(tensor)]
    if kept:
        more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
        share = sum(each.nbytes for each in kept) / sum(each.nbytes for each in every)
        raise UserError(
            f"{folder}: {tool} does not quantize this model's experts: {kept[0].name}{more} would stay "
            f"{kept[0].dtype}, {share:.0%} of the artifact's bytes; leave this format out for this model"
        )


def _is_matrix_of_experts(tensor: Tensor) -> bool:
    """Return whether a stored tensor has weights of experts in full: a linear layer's, or a stack of matrices. Scales
    and biases have other names or fewer dimensions."""
    linear = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    return (
        tensor.dtype in FLOATS
        and (linear or len(tensor.shape) == 3)
        and any(part in tensor.name for part in EXPERT_PARTS)
    )
