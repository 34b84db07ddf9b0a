"""A CPU's work between the matrices, in TVM's loop language: norms, activations, the choice of a token.

Vectors of 16 float32; S is the number of positions.
"""

# TVM reads T.Buffer((1,), "int32") as a type:
# mypy: disable-error-code="valid-type"

from functools import cache
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from quantmill.mlc.cpu_layout import LANES

LOG2_E = 1.4426950408889634
LN_2_POWERS = [1.0, 0.6931471805599453, 0.2402265069591007, 0.0555041086648216, 0.009618129107628477]
LN_2_POWERS += [0.0013333558146428443, 0.0001540353039338161]  # ln(2)^k / k!


def exp2(x: Any) -> Any:
    """2**x for float32 x within [-126, 126], to 2e-7: an expression that makes vectors, unlike the C library's."""
    whole = T.floor(x + T.float32(0.5))
    rest, result = x - whole, T.float32(LN_2_POWERS[-1])
    for power in reversed(LN_2_POWERS[:-1]):
        result = result * rest + T.float32(power)
    return result * T.reinterpret("float32", T.shift_left(T.Cast("int32", whole) + 127, 23))


def gated(gate: Any, up: Any) -> Any:
    """Return the expression gate * sigmoid(gate) * up, in float32."""
    power = T.max(T.min(gate * T.float32(-LOG2_E), T.float32(126)), T.float32(-126))
    return gate * up / (T.float32(1) + exp2(power))


def loop(many: bool, extent: Any) -> Any:
    """Loop over all threads, or for one position in this one: waking threads costs more than the work."""
    return T.parallel(extent) if many else T.serial(extent)


@cache
def rms_norm(size: int, epsilon: float, many: bool) -> PrimFunc:
    """Calculate x / sqrt(mean(x**2) + epsilon) * weight, for [1, S, size]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, weight: T.Buffer((size,), "float16"), out_handle: T.handle) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, size), "float32")
        out = T.match_buffer(out_handle, (1, S, size), "float32")
        for s in loop(many, S):
            with T.sblock("position"):
                T.reads()
                T.writes()
                squares = T.sblock_alloc_buffer((LANES,), "float32", scope="local")
                factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
                for v in T.vectorized(LANES):
                    squares[v] = T.float32(0)
                for k in T.serial(size // LANES):
                    for v in T.vectorized(LANES):
                        squares[v] += x[0, s, k * LANES + v] * x[0, s, k * LANES + v]
                factor[0] = T.float32(0)
                for v in T.unroll(LANES):
                    factor[0] += squares[v]
                factor[0] = T.float32(1) / T.sqrt(factor[0] / T.float32(size) + T.float32(epsilon))
                for k in T.serial(size // LANES):
                    for v in T.vectorized(LANES):
                        out[0, s, k * LANES + v] = (
                            x[0, s, k * LANES + v] * factor[0] * T.Cast("float32", weight[k * LANES + v])
                        )

    return kernel


@cache
def silu_multiply(size: int, many: bool) -> PrimFunc:
    """Calculate gate * sigmoid(gate) * up, for [1, S, 2 * size] with gate and up."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, 2 * size), "float32")
        out = T.match_buffer(out_handle, (1, S, size), "float32")
        with T.sblock("root"):
            for s in loop(many, S):
                for k in T.serial(size // LANES):
                    for v in T.vectorized(LANES):
                        out[0, s, k * LANES + v] = gated(x[0, s, k * LANES + v], x[0, s, size + k * LANES + v])

    return kernel


@cache
def last_position(size: int) -> PrimFunc:
    """[1, S, size] -> its last position [1, 1, size]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, out: T.Buffer((1, 1, size), "float32")) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, size), "float32")
        with T.sblock("root"):
            for k in T.serial(size):
                out[0, 0, k] = x[0, S - 1, k]

    return kernel


@cache
def choose(vocabulary: int) -> PrimFunc:
    """Choose the first token of the largest logit + bias, and advance the position by the S that were read."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        logits: T.Buffer((1, 1, vocabulary), "float32"),
        bias: T.Buffer((vocabulary,), "float32"),
        tokens_handle: T.handle,
        token: T.Buffer((1, 1), "int32"),
        position: T.Buffer((1,), "int32"),
    ) -> None:
        T.func_attr({"tirx.is_scheduled": True})
        S = T.int64()
        T.match_buffer(tokens_handle, (1, S), "int32")
        with T.sblock("root"):
            best = T.sblock_alloc_buffer((LANES,), "float32", scope="local")
            place = T.sblock_alloc_buffer((LANES,), "int32", scope="local")
            for v in T.vectorized(LANES):
                best[v] = T.min_value("float32")
                place[v] = T.int32(0)
            for n in T.serial(vocabulary // LANES):
                for v in T.vectorized(LANES):
                    place[v] = T.Select(
                        logits[0, 0, n * LANES + v] + bias[n * LANES + v] > best[v], T.Cast("int32", n), place[v]
                    )
                    best[v] = T.max(best[v], logits[0, 0, n * LANES + v] + bias[n * LANES + v])
            place[0] = place[0] * LANES
            for v in T.serial(1, LANES):
                if best[v] > best[0] or (best[v] == best[0] and place[v] * LANES + v < place[0]):
                    best[0] = best[v]
                    place[0] = place[v] * LANES + v
            token[0, 0] = place[0]
            position[0] = position[0] + T.Cast("int32", S)

    return kernel
