"""A CPU's products with quantized matrices, in TVM's loop language with the schedules written out.

Matrices come packed by `cpu_layout`: 16 rows side by side are the lanes of a vector, so that sums need no exchange
between lanes. Activations and sums are float32. S is the number of positions.
"""

# TVM reads T.Buffer((1,), "int32") as a type:
# mypy: disable-error-code="valid-type"

from functools import cache
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from quantmill.mlc.cpu_layout import LANES
from quantmill.mlc.quantize import GROUP

WORDS = GROUP // 8  # of a group in a row
COLUMNS = 2  # vectors of outputs in a tile of the matrix product
ROWS = 8  # positions in it: 16 sums in registers
DEPTH = 512  # inputs dequantized at a time: 64 KiB


def nibble(word: Any, i: Any) -> Any:
    """Return the i-th of a word's eight weights, as float32: 0 to 15."""
    return T.Cast("float32", T.Cast("int32", (word >> T.Cast("uint32", 4 * i)) & T.uint32(15)))


def mask_nibble(word: Any, i: Any) -> Any:
    """Return the same without the shift, 16**i times as large; the eighth is shifted, because it would be negative."""
    last, others = word >> T.uint32(28), word & (T.uint32(15) << T.Cast("uint32", 4 * i))
    return T.Cast("float32", T.Cast("int32", T.if_then_else(i == 7, last, others)))


def mask_scale(i: Any) -> Any:
    """Return the exact factor for `mask_nibble`: 16**-i; 1 for the eighth."""
    return T.if_then_else(i == 7, T.float32(1), T.reinterpret("float32", (127 - 4 * i) << 23))


@cache
def matrix_vector(outputs: int, inputs: int) -> PrimFunc:
    """Multiply x [1, 1, inputs] by a packed matrix, dequantized in registers.

    The offset of 7 is subtracted by group, as 7 times the sum of the group's inputs.
    """
    blocks, groups = outputs // LANES, inputs // GROUP

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        x: T.Buffer((1, 1, inputs), "float32"),
        weight: T.Buffer((blocks, groups * WORDS, LANES), "uint32"),
        scale: T.Buffer((blocks, groups, LANES), "float16"),
        out: T.Buffer((1, 1, outputs), "float32"),
    ) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        with T.sblock("root"):
            scaled = T.sblock_alloc_buffer((inputs,), "float32")
            offset = T.sblock_alloc_buffer((groups,), "float32")
            for g in T.serial(groups):
                offset[g] = T.float32(0)
                for k in T.serial(GROUP):
                    offset[g] = offset[g] - x[0, 0, g * GROUP + k] * T.float32(7)
                for j in T.serial(WORDS):
                    for i in T.unroll(8):
                        scaled[g * GROUP + j * 8 + i] = x[0, 0, g * GROUP + j * 8 + i] * mask_scale(i)
            for n in T.parallel(blocks):
                with T.sblock("rows"):
                    T.reads()
                    T.writes()
                    total = T.sblock_alloc_buffer((LANES,), "float32", scope="local")
                    part = T.sblock_alloc_buffer((WORDS, LANES), "float32", scope="local")
                    for v in T.vectorized(LANES):
                        total[v] = T.float32(0)
                    for g in T.serial(groups):
                        for j in T.unroll(WORDS):
                            for v in T.vectorized(LANES):
                                part[j, v] = T.if_then_else(j == 0, offset[g], T.float32(0))
                        for i in T.unroll(8):
                            for j in T.unroll(WORDS):
                                for v in T.vectorized(LANES):
                                    part[j, v] += scaled[g * GROUP + j * 8 + i] * mask_nibble(
                                        weight[n, g * WORDS + j, v], i
                                    )
                        for v in T.vectorized(LANES):
                            total[v] += (part[0, v] + part[1, v] + part[2, v] + part[3, v]) * T.Cast(
                                "float32", scale[n, g, v]
                            )
                    for v in T.vectorized(LANES):
                        out[0, 0, n * LANES + v] = total[v]

    return kernel


@cache
def matrix_matrix(outputs: int, inputs: int) -> PrimFunc:
    """Multiply x [1, S, inputs] by a packed matrix. Each task dequantizes its columns once for all positions."""
    blocks, groups = outputs // LANES, inputs // GROUP
    depth_groups = DEPTH // GROUP
    chunks = -(-groups // depth_groups)

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, weight_handle: T.handle, scale_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, inputs), "float32")
        weight = T.match_buffer(weight_handle, (blocks, groups * WORDS, LANES), "uint32")
        scale = T.match_buffer(scale_handle, (blocks, groups, LANES), "float16")
        out = T.match_buffer(out_handle, (1, S, outputs), "float32")
        for n in T.parallel(blocks // COLUMNS):
            with T.sblock("columns"):
                T.reads()
                T.writes()
                tile = T.sblock_alloc_buffer((DEPTH, COLUMNS, LANES), "float32")
                total = T.sblock_alloc_buffer((ROWS, COLUMNS, LANES), "float32", scope="local")
                for c in T.serial(chunks):
                    for g in T.serial(T.min(depth_groups, groups - c * depth_groups)):
                        for j in T.serial(WORDS):
                            for i in T.unroll(8):
                                for w in T.unroll(COLUMNS):
                                    for v in T.vectorized(LANES):
                                        tile[g * GROUP + j * 8 + i, w, v] = (
                                            nibble(weight[n * COLUMNS + w, (c * depth_groups + g) * WORDS + j, v], i)
                                            - T.float32(7)
                                        ) * T.Cast("float32", scale[n * COLUMNS + w, c * depth_groups + g, v])
                    for s in T.serial(T.ceildiv(S, ROWS)):
                        for r in T.unroll(ROWS):
                            for w in T.unroll(COLUMNS):
                                for v in T.vectorized(LANES):
                                    total[r, w, v] = T.if_then_else(
                                        c == 0,
                                        T.float32(0),
                                        out[0, T.min(s * ROWS + r, S - 1), (n * COLUMNS + w) * LANES + v],
                                    )
                        for k in T.serial(T.min(DEPTH, inputs - c * DEPTH)):
                            for r in T.unroll(ROWS):
                                for w in T.unroll(COLUMNS):
                                    for v in T.vectorized(LANES):
                                        total[r, w, v] += (
                                            x[0, T.min(s * ROWS + r, S - 1), c * DEPTH + k] * tile[k, w, v]
                                        )
                        for r in T.unroll(ROWS):
                            if s * ROWS + r < S:
                                for w in T.unroll(COLUMNS):
                                    for v in T.vectorized(LANES):
                                        out[0, s * ROWS + r, (n * COLUMNS + w) * LANES + v] = total[r, w, v]

    return kernel


@cache
def embed(rows: int, inputs: int) -> PrimFunc:
    """Rows of a packed matrix, dequantized: tokens [1, S] -> [1, S, inputs]."""
    blocks, groups = rows // LANES, inputs // GROUP

    @T.prim_func(private=True, s_tir=True)
    def kernel(tokens_handle: T.handle, weight_handle: T.handle, scale_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        tokens = T.match_buffer(tokens_handle, (1, S), "int32")
        weight = T.match_buffer(weight_handle, (blocks, groups * WORDS, LANES), "uint32")
        scale = T.match_buffer(scale_handle, (blocks, groups, LANES), "float16")
        out = T.match_buffer(out_handle, (1, S, inputs), "float32")
        with T.sblock("root"):
            for s in T.serial(S):
                for j in T.serial(groups * WORDS):
                    for i in T.unroll(8):
                        out[0, s, j * 8 + i] = (
                            nibble(weight[tokens[0, s] // LANES, j, tokens[0, s] % LANES], i) - T.float32(7)
                        ) * T.Cast("float32", scale[tokens[0, s] // LANES, j // WORDS, tokens[0, s] % LANES])

    return kernel
