"""A CPU's attention over a contiguous key-value cache, in TVM's loop language. S is the number of positions."""

from functools import cache

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from mlc.cpu_layout import LANES
from mlc.cpu_vectors import LOG2_E, exp2

KEYS = 64  # keys that are scored at a time


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


@cache
def attention(layers: int, heads: int, kv_heads: int, size: int, many: bool) -> PrimFunc:
    """Rotate, append to the cache, and attend to all positions up to each query's own.

    qkv is [1, S, (heads + 2 kv_heads) * size]; keys are [layers, kv_heads, size, C] and values
    [layers, kv_heads, C, size], of C positions, a multiple of `KEYS`. Softmax goes over tiles of keys with a running
    maximum (Milakov and Gimelshein 2018), so that no score is kept.
    """
    half, share = size // 2, heads // kv_heads
    rows = max(1, 256 // size) if many else 1
    key_vectors, value_vectors = KEYS // LANES, size // LANES
    width = (heads + 2 * kv_heads) * size

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
        qkv = T.match_buffer(qkv_handle, (1, S, width), "float32")
        cosine = T.match_buffer(cosine_handle, (S, half), "float32")
        sine = T.match_buffer(sine_handle, (S, half), "float32")
        keys = T.match_buffer(keys_handle, (layers, kv_heads, size, C), "float32")
        values = T.match_buffer(values_handle, (layers, kv_heads, C, size), "float32")
        out = T.match_buffer(out_handle, (1, S, heads * size), "float32")
        for s in T.serial(S):
            for h in T.serial(kv_heads):
                for d in T.serial(half):
                    keys[layer[0], h, d, position[0] + s] = (
                        qkv[0, s, (heads + h) * size + d] * cosine[s, d]
                        - qkv[0, s, (heads + h) * size + half + d] * sine[s, d]
                    )
                    keys[layer[0], h, half + d, position[0] + s] = (
                        qkv[0, s, (heads + h) * size + half + d] * cosine[s, d]
                        + qkv[0, s, (heads + h) * size + d] * sine[s, d]
                    )
                for d in T.serial(size):
                    values[layer[0], h, position[0] + s, d] = qkv[0, s, (heads + kv_heads + h) * size + d]
        for task in T.parallel(T.ceildiv(S, rows) * heads):
            with T.sblock("queries"):
                T.reads()
                T.writes()
                query = T.sblock_alloc_buffer((rows, size), "float32")
                score = T.sblock_alloc_buffer((rows, key_vectors, LANES), "float32")
                best = T.sblock_alloc_buffer((rows,), "float32")
                before = T.sblock_alloc_buffer((rows,), "float32")
                weights = T.sblock_alloc_buffer((rows,), "float32")
                total = T.sblock_alloc_buffer((rows, value_vectors, LANES), "float32", scope="local")
                h: T.let[T.int64] = task % heads
                first: T.let[T.int64] = task // heads * rows
                count: T.let[T.int64] = T.Cast("int64", position[0]) + T.min(first + rows, S)  # keys of the last query
                for r in T.unroll(rows):
                    for d in T.serial(half):
                        query[r, d] = (
                            qkv[0, T.min(first + r, S - 1), h * size + d] * cosine[T.min(first + r, S - 1), d]
                            - qkv[0, T.min(first + r, S - 1), h * size + half + d] * sine[T.min(first + r, S - 1), d]
                        ) * T.float32(LOG2_E / size**0.5)
                        query[r, half + d] = (
                            qkv[0, T.min(first + r, S - 1), h * size + half + d] * cosine[T.min(first + r, S - 1), d]
                            + qkv[0, T.min(first + r, S - 1), h * size + d] * sine[T.min(first + r, S - 1), d]
                        ) * T.float32(LOG2_E / size**0.5)
                    best[r] = T.float32(-1e30)
                    weights[r] = T.float32(0)
                    for w in T.unroll(value_vectors):
                        for v in T.vectorized(LANES):
                            total[r, w, v] = T.float32(0)
                for t in T.serial(T.ceildiv(count, KEYS)):
                    with T.sblock("scores"):
                        T.reads()
                        T.writes()
                        product = T.sblock_alloc_buffer((rows, key_vectors, LANES), "float32", scope="local")
                        for r in T.unroll(rows):
                            for w in T.unroll(key_vectors):
                                for v in T.vectorized(LANES):
                                    product[r, w, v] = T.float32(0)
                        for d in T.serial(size):
                            for r in T.unroll(rows):
                                for w in T.unroll(key_vectors):
                                    for v in T.vectorized(LANES):
                                        product[r, w, v] += (
                                            query[r, d] * keys[layer[0], h // share, d, t * KEYS + w * LANES + v]
                                        )
                        for r in T.unroll(rows):
                            for w in T.unroll(key_vectors):
                                for v in T.vectorized(LANES):
                                    score[r, w, v] = T.Select(
                                        t * KEYS + w * LANES + v <= T.Cast("int64", position[0]) + first + r,
                                        product[r, w, v],
                                        T.float32(-1e30),
                                    )
                    for r in T.unroll(rows):
                        before[r] = best[r]
                        for w in T.serial(key_vectors):
                            for v in T.serial(LANES):
                                best[r] = T.max(best[r], score[r, w, v])
                        for w in T.unroll(key_vectors):
                            for v in T.vectorized(LANES):
                                score[r, w, v] = exp2(T.max(score[r, w, v] - best[r], T.float32(-126)))
                        before[r] = exp2(T.max(before[r] - best[r], T.float32(-126)))
                        weights[r] = weights[r] * before[r]
                        for w in T.serial(key_vectors):
                            for v in T.serial(LANES):
                                weights[r] += score[r, w, v]
                        for w in T.unroll(value_vectors):
                            for v in T.vectorized(LANES):
                                total[r, w, v] = total[r, w, v] * before[r]
                    for k in T.serial(T.min(count - t * KEYS, KEYS)):
                        for r in T.unroll(rows):
                            for w in T.unroll(value_vectors):
                                for v in T.vectorized(LANES):
                                    total[r, w, v] += (
                                        score[r, k // LANES, k % LANES]
                                        * values[layer[0], h // share, t * KEYS + k, w * LANES + v]
                                    )
                for r in T.unroll(rows):
                    if first + r < S:
                        for w in T.unroll(value_vectors):
                            for v in T.vectorized(LANES):
                                out[0, first + r, h * size + w * LANES + v] = total[r, w, v] / weights[r]

    return kernel
