"""The CPU's kernels, in TVM's loop language, with their schedules written out: vectors, registers and parallel loops.

Weights come packed by `cpu_layout`: 16 rows of a matrix side by side are the lanes of a vector, so that sums need no
exchange between lanes. Activations, sums and the key-value cache are float32. S is the number of positions.
"""

from functools import cache
from typing import Any

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from mlc.cpu_layout import LANES

GROUP = 32  # weights that share a scale: 4 words of 8
WORDS = 4
COLUMNS = 32  # outputs of one tile of the matrix product: two vectors
ROWS = 8  # positions of one tile: 16 sums in registers
DEPTH = 512  # inputs that a tile has dequantized at a time: 64 KiB
KEYS = 64  # keys that a tile of attention scores at a time
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


def loop(many: bool, extent: Any) -> Any:
    """Over all threads, or for one position in this one: waking threads costs more than the work."""
    return T.parallel(extent) if many else T.serial(extent)


@cache
def matrix_vector(outputs: int, inputs: int) -> PrimFunc:
    """x [1, 1, inputs] times a packed matrix, dequantized in registers.

    A nibble is masked where it stands, 16**i times too large, and the input is that much smaller: exact, and no shift.
    The offset of 7 is taken off by group, as 7 times the sum of the group's inputs.
    """
    blocks, groups = outputs // LANES, inputs // GROUP

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        x: T.Buffer((1, 1, inputs), "float32"),
        weight: T.Buffer((blocks, groups * WORDS, LANES), "uint32"),
        scale: T.Buffer((blocks, groups, LANES), "float16"),
        out: T.Buffer((1, 1, outputs), "float32"),
    ):
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
                        scaled[g * GROUP + j * 8 + i] = x[0, 0, g * GROUP + j * 8 + i] * T.if_then_else(
                            i == 7, T.float32(1), T.reinterpret("float32", T.shift_left(127 - 4 * i, 23))
                        )
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
                                    part[j, v] += scaled[g * GROUP + j * 8 + i] * T.Cast(
                                        "float32",
                                        T.Cast(
                                            "int32",
                                            T.if_then_else(
                                                i == 7,
                                                T.shift_right(weight[n, g * WORDS + j, v], T.uint32(28)),
                                                T.bitwise_and(
                                                    weight[n, g * WORDS + j, v],
                                                    T.shift_left(T.uint32(15), T.Cast("uint32", 4 * i)),
                                                ),
                                            ),
                                        ),
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
    """x [1, S, inputs] times a packed matrix: each task dequantizes `COLUMNS` of it once for all positions."""
    blocks, groups = outputs // LANES, inputs // GROUP
    wide, chunk = COLUMNS // LANES, DEPTH // GROUP
    chunks = -(-groups // chunk)

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, weight_handle: T.handle, scale_handle: T.handle, out_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, inputs), "float32")
        weight = T.match_buffer(weight_handle, (blocks, groups * WORDS, LANES), "uint32")
        scale = T.match_buffer(scale_handle, (blocks, groups, LANES), "float16")
        out = T.match_buffer(out_handle, (1, S, outputs), "float32")
        for n in T.parallel(blocks // wide):
            with T.sblock("columns"):
                T.reads()
                T.writes()
                tile = T.sblock_alloc_buffer((DEPTH, wide, LANES), "float32")
                total = T.sblock_alloc_buffer((ROWS, wide, LANES), "float32", scope="local")
                for c in T.serial(chunks):
                    for g in T.serial(T.min(chunk, groups - c * chunk)):
                        for j in T.serial(WORDS):
                            for i in T.unroll(8):
                                for w in T.unroll(wide):
                                    for v in T.vectorized(LANES):
                                        tile[g * GROUP + j * 8 + i, w, v] = (
                                            T.Cast(
                                                "float32",
                                                T.Cast(
                                                    "int32",
                                                    T.bitwise_and(
                                                        T.shift_right(
                                                            weight[n * wide + w, (c * chunk + g) * WORDS + j, v],
                                                            T.Cast("uint32", 4 * i),
                                                        ),
                                                        T.uint32(15),
                                                    ),
                                                )
                                                - 7,
                                            )
                                            * T.Cast("float32", scale[n * wide + w, c * chunk + g, v])
                                        )
                    for s in T.serial(T.ceildiv(S, ROWS)):
                        for r in T.unroll(ROWS):
                            for w in T.unroll(wide):
                                for v in T.vectorized(LANES):
                                    total[r, w, v] = T.if_then_else(
                                        c == 0,
                                        T.float32(0),
                                        out[0, T.min(s * ROWS + r, S - 1), (n * wide + w) * LANES + v],
                                    )
                        for k in T.serial(T.min(DEPTH, inputs - c * DEPTH)):
                            for r in T.unroll(ROWS):
                                for w in T.unroll(wide):
                                    for v in T.vectorized(LANES):
                                        total[r, w, v] += (
                                            x[0, T.min(s * ROWS + r, S - 1), c * DEPTH + k] * tile[k, w, v]
                                        )
                        for r in T.unroll(ROWS):
                            if s * ROWS + r < S:
                                for w in T.unroll(wide):
                                    for v in T.vectorized(LANES):
                                        out[0, s * ROWS + r, (n * wide + w) * LANES + v] = total[r, w, v]

    return kernel


@cache
def rms_norm(size: int, epsilon: float, many: bool) -> PrimFunc:
    """x / sqrt(mean(x**2) + epsilon) * weight, of [1, S, size]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, weight: T.Buffer((size,), "float16"), out_handle: T.handle):
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
    """gate * sigmoid(gate) * up, of [1, S, 2 * size] that holds gate and up."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, out_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, 2 * size), "float32")
        out = T.match_buffer(out_handle, (1, S, size), "float32")
        with T.sblock("root"):
            for s in loop(many, S):
                for k in T.serial(size // LANES):
                    for v in T.vectorized(LANES):
                        out[0, s, k * LANES + v] = (
                            x[0, s, k * LANES + v]
                            * x[0, s, size + k * LANES + v]
                            / (
                                T.float32(1)
                                + exp2(
                                    T.max(T.min(x[0, s, k * LANES + v] * T.float32(-LOG2_E), T.float32(126)), T.float32(-126))
                                )
                            )
                        )

    return kernel


@cache
def embed(rows: int, inputs: int) -> PrimFunc:
    """Rows of a packed matrix, dequantized: tokens [1, S] -> [1, S, inputs]."""
    blocks, groups = rows // LANES, inputs // GROUP

    @T.prim_func(private=True, s_tir=True)
    def kernel(tokens_handle: T.handle, weight_handle: T.handle, scale_handle: T.handle, out_handle: T.handle):
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
                        out[0, s, j * 8 + i] = T.Cast(
                            "float32",
                            T.Cast(
                                "int32",
                                T.bitwise_and(
                                    T.shift_right(
                                        weight[tokens[0, s] // LANES, j, tokens[0, s] % LANES], T.Cast("uint32", 4 * i)
                                    ),
                                    T.uint32(15),
                                ),
                            )
                            - 7,
                        ) * T.Cast("float32", scale[tokens[0, s] // LANES, j // WORDS, tokens[0, s] % LANES])

    return kernel


@cache
def rotations(half: int) -> PrimFunc:
    """Cosines and sines [S, half] of the positions from position[0] on, by frequency [half]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        position: T.Buffer((1,), "int32"),
        frequency: T.Buffer((half,), "float32"),
        cosine_handle: T.handle,
        sine_handle: T.handle,
    ):
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
    ):
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


@cache
def last_position(size: int) -> PrimFunc:
    """[1, S, size] -> its last position [1, 1, size]."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(x_handle: T.handle, out: T.Buffer((1, 1, size), "float32")):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        S = T.int64()
        x = T.match_buffer(x_handle, (1, S, size), "float32")
        with T.sblock("root"):
            for k in T.serial(size):
                out[0, 0, k] = x[0, S - 1, k]

    return kernel


@cache
def choose(vocabulary: int) -> PrimFunc:
    """The token of the largest logit + bias, the first of equals; and the position after the S that were read."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        logits: T.Buffer((1, 1, vocabulary), "float32"),
        bias: T.Buffer((vocabulary,), "float32"),
        tokens_handle: T.handle,
        token: T.Buffer((1, 1), "int32"),
        position: T.Buffer((1,), "int32"),
    ):
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
