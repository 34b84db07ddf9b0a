"""A CPU's attention over a contiguous key-value cache, in TVM's loop language. S is the number of positions."""

# TVM reads T.Buffer((1,), "int32") as a type:
# mypy: disable-error-code="valid-type"

from dataclasses import dataclass
from functools import cache
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from quantmill.mlc.cpu_layout import LANES
from quantmill.mlc.cpu_vectors import LOG2_E, exp2

KEYS = 64  # keys that are scored at a time
KEY_VECTORS = KEYS // LANES


@dataclass(frozen=True)
class Heads:
    """A layer's heads of `size` elements each, and a head's queries that read the keys together (`rows`)."""

    queries: int
    keys: int
    size: int
    rows: int

    @property
    def half(self) -> int:
        """Half of a head: each of its elements is rotated with one of the other half."""
        return self.size // 2

    @property
    def vectors(self) -> int:
        """Number of vectors of a head."""
        return self.size // LANES

    @property
    def scale(self) -> float:
        """Factor of the queries, for a softmax with powers of 2 instead of e."""
        return LOG2_E / self.size**0.5


@cache
def rotations(half: int) -> PrimFunc:
    """Cosines and sines [S, half] of the positions from position[0] on, by frequency [half]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        position: T.Buffer((1,), "int32"),
        frequency: T.Buffer((half,), "float32"),
        cosine_handle: T.handle,
        sine_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        cosine = T.match_buffer(cosine_handle, (S, half), "float32")
        sine = T.match_buffer(sine_handle, (S, half), "float32")
        with T.sblock("root"):
            for s in T.serial(S):
                for d in T.serial(half):
                    cosine[s, d] = T.cos(T.Cast("float32", position[0] + T.Cast("int32", s)) * frequency[d])
                    sine[s, d] = T.sin(T.Cast("float32", position[0] + T.Cast("int32", s)) * frequency[d])

    return kernel


def rotate(n: Heads, qkv: Any, cosine: Any, sine: Any, s: Any, head: Any, d: Any) -> tuple[Any, Any]:
    """Rotate elements d and half + d of a head of position s; heads are counted over all of qkv."""
    low, high = qkv[0, s, head * n.size + d], qkv[0, s, head * n.size + n.half + d]
    return low * cosine[s, d] - high * sine[s, d], high * cosine[s, d] + low * sine[s, d]


@T.inline
def append(
    n: Heads, S: Any, qkv: Any, cosine: Any, sine: Any, layer: Any, position: Any, keys: Any, values: Any
) -> None:
    """Put the rotated keys, and the values, of S positions into the cache."""
    for s in T.serial(S):
        for h in T.serial(n.keys):
            for d in T.serial(n.half):
                keys[layer[0], h, d, position[0] + s] = rotate(n, qkv, cosine, sine, s, n.queries + h, d)[0]
                keys[layer[0], h, n.half + d, position[0] + s] = rotate(n, qkv, cosine, sine, s, n.queries + h, d)[1]
            for d in T.serial(n.size):
                values[layer[0], h, position[0] + s, d] = qkv[0, s, (n.queries + n.keys + h) * n.size + d]


@T.inline
def begin(
    n: Heads,
    S: Any,
    qkv: Any,
    cosine: Any,
    sine: Any,
    h: Any,
    first: Any,
    query: Any,
    best: Any,
    weights: Any,
    total: Any,
) -> None:
    """Rotate and scale the queries of head h from position `first` on; no key is seen yet."""
    for r in T.unroll(n.rows):
        for d in T.serial(n.half):
            query[r, d] = rotate(n, qkv, cosine, sine, T.min(first + r, S - 1), h, d)[0] * T.float32(n.scale)
            query[r, n.half + d] = rotate(n, qkv, cosine, sine, T.min(first + r, S - 1), h, d)[1] * T.float32(n.scale)
        best[r] = T.float32(-1e30)
        weights[r] = T.float32(0)
        for w in T.unroll(n.vectors):
            for v in T.vectorized(LANES):
                total[r, w, v] = T.float32(0)


@T.inline
def score_keys(
    n: Heads, query: Any, keys: Any, layer: Any, h: Any, t: Any, last: Any, product: Any, score: Any
) -> None:
    """Scores of the queries with tile t of the keys; the first query sees keys up to `last`."""
    for r in T.unroll(n.rows):
        for w in T.unroll(KEY_VECTORS):
            for v in T.vectorized(LANES):
                product[r, w, v] = T.float32(0)
    for d in T.serial(n.size):
        for r in T.unroll(n.rows):
            for w in T.unroll(KEY_VECTORS):
                for v in T.vectorized(LANES):
                    product[r, w, v] += query[r, d] * keys[layer[0], h, d, t * KEYS + w * LANES + v]
    for r in T.unroll(n.rows):
        for w in T.unroll(KEY_VECTORS):
            for v in T.vectorized(LANES):
                score[r, w, v] = T.Select(t * KEYS + w * LANES + v <= last + r, product[r, w, v], T.float32(-1e30))


@T.inline
def weigh(n: Heads, score: Any, best: Any, before: Any, weights: Any, total: Any) -> None:
    """Turn a tile's scores into weights relative to a new maximum, and rescale the sums so far to it."""
    for r in T.unroll(n.rows):
        before[r] = best[r]
        for w in T.serial(KEY_VECTORS):
            for v in T.serial(LANES):
                best[r] = T.max(best[r], score[r, w, v])
        for w in T.unroll(KEY_VECTORS):
            for v in T.vectorized(LANES):
                score[r, w, v] = exp2(T.max(score[r, w, v] - best[r], T.float32(-126)))
        before[r] = exp2(T.max(before[r] - best[r], T.float32(-126)))
        weights[r] = weights[r] * before[r]
        for w in T.serial(KEY_VECTORS):
            for v in T.serial(LANES):
                weights[r] += score[r, w, v]
        for w in T.unroll(n.vectors):
            for v in T.vectorized(LANES):
                total[r, w, v] = total[r, w, v] * before[r]


@T.inline
def add_values(n: Heads, score: Any, values: Any, layer: Any, h: Any, t: Any, count: Any, total: Any) -> None:
    """Add the weighted values of tile t, for its keys below `count`."""
    for k in T.serial(T.min(count - t * KEYS, KEYS)):
        for r in T.unroll(n.rows):
            for w in T.unroll(n.vectors):
                for v in T.vectorized(LANES):
                    total[r, w, v] += score[r, k // LANES, k % LANES] * values[layer[0], h, t * KEYS + k, w * LANES + v]


@cache
def attention(layers: int, heads: int, kv_heads: int, size: int, many: bool) -> PrimFunc:
    """Rotate, append to the cache, and attend to all positions up to each query's own.

    qkv is [1, S, (heads + 2 kv_heads) * size]; keys are [layers, kv_heads, size, C] and values
    [layers, kv_heads, C, size], of C positions, a multiple of `KEYS`. Softmax goes over tiles of keys with a running
    maximum (Milakov and Gimelshein 2018), so that no score is kept.
    """
    n = Heads(heads, kv_heads, size, max(1, 256 // size) if many else 1)
    share, rows = heads // kv_heads, n.rows

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        qkv_handle: T.handle,
        cosine_handle: T.handle,
        sine_handle: T.handle,
        position: T.Buffer((1,), "int32"),
        layer: T.Buffer((1,), "int32"),
        keys_handle: T.handle,
        values_handle: T.handle,
        out_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S, C = T.int64(), T.int64()
        qkv = T.match_buffer(qkv_handle, (1, S, (heads + 2 * kv_heads) * size), "float32")
        cosine = T.match_buffer(cosine_handle, (S, n.half), "float32")
        sine = T.match_buffer(sine_handle, (S, n.half), "float32")
        keys = T.match_buffer(keys_handle, (layers, kv_heads, size, C), "float32")
        values = T.match_buffer(values_handle, (layers, kv_heads, C, size), "float32")
        out = T.match_buffer(out_handle, (1, S, heads * size), "float32")
        append(n, S, qkv, cosine, sine, layer, position, keys, values)
        for task in T.parallel(T.ceildiv(S, rows) * heads):
            with T.sblock("queries"):
                T.reads()
                T.writes()
                query = T.sblock_alloc_buffer((rows, size), "float32")
                score = T.sblock_alloc_buffer((rows, KEY_VECTORS, LANES), "float32")
                best = T.sblock_alloc_buffer((rows,), "float32")
                before = T.sblock_alloc_buffer((rows,), "float32")
                weights = T.sblock_alloc_buffer((rows,), "float32")
                total = T.sblock_alloc_buffer((rows, n.vectors, LANES), "float32", scope="local")
                h: T.let[T.int64] = task % heads
                first: T.let[T.int64] = task // heads * rows
                count: T.let[T.int64] = T.Cast("int64", position[0]) + T.min(first + rows, S)  # keys of the last query
                begin(n, S, qkv, cosine, sine, h, first, query, best, weights, total)
                for t in T.serial(T.ceildiv(count, KEYS)):
                    with T.sblock("scores"):
                        T.reads()
                        T.writes()
                        product = T.sblock_alloc_buffer((rows, KEY_VECTORS, LANES), "float32", scope="local")
                        score_keys(
                            n, query, keys, layer, h // share, t, T.Cast("int64", position[0]) + first, product, score
                        )
                    weigh(n, score, best, before, weights, total)
                    add_values(n, score, values, layer, h // share, t, count, total)
                for r in T.unroll(rows):
                    if first + r < S:
                        for w in T.unroll(n.vectors):
                            for v in T.vectorized(LANES):
                                out[0, first + r, h * size + w * LANES + v] = total[r, w, v] / weights[r]

    return kernel
