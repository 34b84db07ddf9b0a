"""A quantized matrix times many positions on a GPU, and the norm before it (cuda_products.cuh)."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tvm import tirx
from tvm.tirx import PrimFunc

from quantmill.mlc import cuda_matrices
from quantmill.mlc.cuda_kernel import include_guard, kernel
from quantmill.mlc.quantize import GROUP

SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
WARP_ROWS, TILE = 64, 8  # of a warp, and positions of an instruction
THREADS = 256
ALIGNMENT = 1024  # bytes, of shared memory; TVM guarantees 64
Epilogue = Literal["PLAIN", "BIAS", "RESIDUAL", "GATE"]


@dataclass(frozen=True)
class Block:
    """Division of rows, positions and inputs among a block's warps.

    A warp has 64 rows, `tiles` * 8 positions, and `depth` groups of inputs in a step; `stages` of steps are in shared
    memory. Four warps of 128 rows and 128 positions work together if the GPU has instructions for them.
    """

    rows: int
    positions: int
    inputs: int
    depth: int
    tiles: int
    stages: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and positions of a block."""
        return self.rows * WARP_ROWS, self.positions * self.tiles * TILE

    @property
    def shared_bytes(self) -> int:
        """Bytes of words, scales and positions of all stages, or afterwards of the float32 sums."""
        rows, positions = self.tile
        stage = self.inputs * self.depth * (positions * 2 * GROUP + rows * (GROUP // 2 + 2))
        return max(self.stages * stage, positions * (rows + 4) * 4)


FEW = (Block(1, 1, 8, 1, 2, 4), Block(1, 1, 8, 1, 4, 3), Block(1, 2, 4, 1, 4, 4))
BLOCKS = (*FEW, Block(2, 2, 2, 1, 8, 4))
WARPGROUP_BLOCKS = (*FEW, Block(2, 2, 2, 2, 8, 4))  # for sm_90a, whose shared memory holds more


@cache
def product(outputs: int, inputs: int, epilogue: Epilogue = "PLAIN", blocks: tuple[Block, ...] = BLOCKS) -> PrimFunc:
    """Multiply arranged x [1, S, inputs] by a matrix [outputs, inputs], with float32 sums rounded once to float16.

    A BIAS [outputs] or a RESIDUAL [1, S, outputs] is added, or SiLU(first half) * second half is taken (GATE) and
    arranged. The last of `blocks` is for any number of positions, the others for S up to their tile. Arguments: x,
    q_weight, q_scale, the addend if any, the result.
    """
    results = outputs // 2 if epilogue == "GATE" else outputs
    buffers: dict[str, Any] = {
        "x": ((1, "S", inputs), "float16"),
        "weight": ((outputs, inputs // 8), "uint32"),
        "scale": ((outputs, inputs // GROUP), "float16"),
    }
    if epilogue in ("BIAS", "RESIDUAL"):
        buffers["add"] = ((outputs,) if epilogue == "BIAS" else (1, "S", outputs), "float16")
    buffers["out"] = ((1, "S", results), "float16")
    name = "_".join(map(str, ("product", outputs, inputs, epilogue, *(n for block in blocks for n in astuple(block)))))
    types = {"weight": "const unsigned*", "out": "half*"}
    declared = ", ".join(f"{types.get(buffer, 'const half*')} {buffer}" for buffer in buffers)
    given = f"x, weight, scale, {'add' if 'add' in buffers else 'nullptr'}, out, count, shared"
    lines = [f"__device__ __forceinline__ void {name}({declared}, int count, unsigned char* shared) {{"]
    for block in blocks:
        template = ", ".join(map(str, (outputs, inputs, epilogue, *astuple(block))))
        condition = "" if block is blocks[-1] else f"if (count <= {block.tile[1]}) return "
        lines.append(f"  {condition}product<{template}>({given});")
    entry = "\n".join([*lines, "}", ""])

    def grid(sizes: Mapping[str, Any]) -> Any:
        """Count the blocks for S positions."""
        tiles = [-(-results // (block.tile[0] // (2 if epilogue == "GATE" else 1))) for block in blocks]
        most = blocks[-1].tile[1]
        found = (sizes["S"] + (most - 1)) // most * tiles[-1]
        for block, number in reversed(list(zip(blocks[:-1], tiles, strict=False))):
            found = tirx.Select(sizes["S"] <= block.tile[1], tirx.const(number, "int64"), found)
        return found

    source = _source() + include_guard(f"MLC_{name}".upper(), entry)
    shared = max(block.shared_bytes for block in blocks) + ALIGNMENT
    return kernel(name, source, buffers, grid, THREADS, ["S"], shared)


@cache
def rms_norm(size: int, epsilon: float) -> PrimFunc:
    """Norm x [1, S, size] (RMS), times a weight. Arguments: x, the weight, the result, arranged."""
    many = ((1, "S", size), "float16")
    name = f"rms_norm_{size}"
    entry = (
        f"__device__ __forceinline__ void {name}(const half* x, const half* norm, half* out) {{\n"
        f"  rms_norm<{size}>(x, norm, out, {epsilon:.9e}f);\n}}\n"
    )
    buffers = {"x": many, "norm": ((size,), "float16"), "out": many}
    return kernel(name, _source() + include_guard(f"MLC_{name}".upper(), entry), buffers, lambda sizes: sizes["S"], 128)


def _source() -> str:
    return include_guard("MLC_MATRIX_VECTOR", cuda_matrices.SOURCE) + include_guard("MLC_PRODUCTS", SOURCE)
