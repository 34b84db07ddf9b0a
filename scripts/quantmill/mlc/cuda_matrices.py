"""A quantized matrix times one vector on a GPU, bound by the weights' bytes.

A warp multiplies 16 rows in tensor cores (mma.m16n8k16), although there is only one vector: that saves the additions,
so that a weight costs less than two instructions. A lane reads a whole group, 16 bytes, of row lane / 4 and of row
lane / 4 + 8; four lanes read four adjacent groups. The order of a sum is free, so the vector is stored in shared memory
in the order in which nibbles come out of a word: 0 4 1 5 2 6 3 7.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tvm.tirx import PrimFunc

from quantmill.mlc.cuda_kernel import include_guard, kernel
from quantmill.mlc.quantize import GROUP

SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")


TYPES = {"weight": "unsigned"}
MULTIPROCESSORS = 132  # of an H100 or H200; on another GPU only the speed depends on it


@dataclass(frozen=True)
class Launch:
    """Division of a product: warps of a block, which share its 16 rows, and blocks on a multiprocessor."""

    warps: int
    resident: int

    def blocks(self, tiles: int) -> int:
        """Return the fewest blocks that need as few rounds as all resident ones."""
        rounds = -(-tiles // (MULTIPROCESSORS * self.resident))
        return -(-tiles // rounds)


def choose_launch(inputs: int) -> Launch:
    """Choose warps that have two steps of 128 inputs each: one is loaded while the other is used."""
    return Launch(16, 2) if inputs >= 4096 else Launch(8, 3)


@cache
def matrix_vector(
    outputs: int,
    inputs: int,
    launch: Launch,
    *,
    epsilon: float | None = None,
    add: tuple[int, ...] | None = None,
    gate: bool = False,
) -> PrimFunc:
    """Multiply x [inputs], normed (RMS) if there is an `epsilon`, by a matrix [outputs, inputs].

    To the float32 sums a vector of shape `add` is added, or SiLU(first half) * second half is taken.
    Arguments: x, q_weight, q_scale, the norm's weight if any, the vector if any, and the result.
    """
    assert not (add and gate)
    norm, results = epsilon is not None, outputs // 2 if gate else outputs
    buffers = {
        "x": ((1, 1, inputs), "float16"),
        "weight": ((outputs, inputs // 8), "uint32"),
        "scale": ((outputs, inputs // GROUP), "float16"),
    }
    if norm:
        buffers["norm"] = ((inputs,), "float16")
    if add:
        buffers["add"] = (add, "float16")
    buffers["out"] = ((1, 1, results), "float16")
    numbers = (outputs, inputs, launch.warps, int(norm), 2 if gate else int(bool(add)))
    name = "_".join(["matrix_vector", *map(str, numbers)])
    names = [*buffers]
    declared = ", ".join(f"{'half' if name == 'out' else 'const ' + TYPES.get(name, 'half')}* {name}" for name in names)
    given = ", ".join(
        f"reinterpret_cast<const uint4*>({name})" if name == "weight" else name if name in buffers else "nullptr"
        for name in ("x", "weight", "scale", "norm", "add", "out")
    )
    template = ", ".join(map(str, numbers))
    entry = (
        f"__device__ __forceinline__ void {name}({declared}) {{\n"
        f"  matrix_vector<{template}>({given}, {epsilon or 0.0:.9e}f);\n}}\n"
    )
    source = include_guard("MLC_MATRIX_VECTOR", SOURCE) + include_guard(f"MLC_{name}".upper(), entry)
    tiles = -(-results // (8 if gate else 16))
    return kernel(name, source, buffers, launch.blocks(tiles), launch.warps * 32)
