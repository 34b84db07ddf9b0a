"""A GPU's attention over a contiguous key-value cache [layers, kv_heads, C, head_dim], float16, of one sequence.

Decoding is bound by the time that memory takes to answer: positions are split over blocks (flash-decoding, Dao et al.
2023), of which the last to finish merges. Many positions go through tensor cores (FlashAttention-2, Dao 2023).
"""

from functools import cache

from tvm.tirx import PrimFunc

from mlc.cuda_kernel import kernel, once

BLOCKS = 132  # that decoding has under way: one on each of an H100's or H200's multiprocessors
THREADS = 128  # of a block that takes many queries
ROWS = 64  # queries of such a block
SOURCE = r"""
__device__ __forceinline__ void rotate(float& low, float& high, float position, float frequency) {
  float sine, cosine;
  sincosf(position * frequency, &sine, &cosine);
  const float before = low;
  low = before * cosine - high * sine;
  high = high * cosine + before * sine;
}
template <int HEADS, int KV_HEADS, int SIZE, int SPLITS, int THREADS>
__device__ __forceinline__ void attend_one(const half* qkv, const float* frequency, const int* position, int* counter,
                                           half* keys, half* values, float* partial, half* out, int layer,
                                           int capacity) {
  constexpr int SHARE = HEADS / KV_HEADS, HALF = SIZE / 2, STRIDE = SIZE + 2, WARPS = THREADS / 32;
  constexpr int LANES = SIZE > 128 ? 32 : SIZE > 64 ? 16 : SIZE > 32 ? 8 : 4, TEAMS = THREADS / LANES;
  constexpr int AT_ONCE = SHARE > 2 ? 4 : 8, STEP = TEAMS * AT_ONCE;
  constexpr int HEADS_AT_ONCE = SHARE * WARPS * SIZE > 8192 ? 1 : SHARE;
  __shared__ float query[SHARE * SIZE];
  __shared__ float warp_sum[HEADS_AT_ONCE][WARPS][SIZE], warp_most[SHARE][WARPS], warp_weight[SHARE][WARPS];
  __shared__ bool is_last;
  start_next_kernel();
  const int tid = threadIdx.x, kv_head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
  // the position, and what lies before it, were there before this recording began: none of its kernels is waited for
  const int here = __ldcg(position), count = here + 1;
  const int each = max((count + SPLITS * 32 - 1) / (SPLITS * 32) * 32, STEP);
  const int active = (count + each - 1) / each, begin = split * each, end = min(begin + each, count);
  if (split >= active) return;
  const size_t head_offset = ((size_t)layer * KV_HEADS + kv_head) * capacity * SIZE;
  keys += head_offset, values += head_offset;
  const int team = tid / LANES, part = tid % LANES;
  const bool inside = part * 8 < SIZE;
  uint4 key[AT_ONCE], value[AT_ONCE];
  const auto load = [&](int first, int from, int to) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int place = first + n * TEAMS + team;
      if (place >= from && place < to && inside) {
        key[n] = *reinterpret_cast<const uint4*>(keys + (size_t)place * SIZE + part * 8);
        value[n] = *reinterpret_cast<const uint4*>(values + (size_t)place * SIZE + part * 8);
      }
    }
  };
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) key[n] = value[n] = make_uint4(0, 0, 0, 0);
  load(begin, begin, min(end, here));
  wait_for_kernel_before();
  for (int i = tid; i < (SHARE + 1) * HALF; i += THREADS) {
    const int head = i / HALF, d = i % HALF;
    const half* from = qkv + (head < SHARE ? kv_head * SHARE + head : HEADS + kv_head) * SIZE;
    float low = __half2float(__ldcg(from + d)), high = __half2float(__ldcg(from + HALF + d));
    rotate(low, high, (float)here, __ldg(frequency + d));
    const half low_half = __float2half(low), high_half = __float2half(high);
    if (head < SHARE) {
      query[head * SIZE + d] = __half2float(low_half);
      query[head * SIZE + HALF + d] = __half2float(high_half);
    } else if (split == active - 1) {
      keys[(size_t)here * SIZE + d] = low_half;
      keys[(size_t)here * SIZE + HALF + d] = high_half;
      const half* value = qkv + (HEADS + KV_HEADS + kv_head) * SIZE;
      values[(size_t)here * SIZE + d] = __ldcg(value + d);
      values[(size_t)here * SIZE + HALF + d] = __ldcg(value + HALF + d);
    }
  }
  __syncthreads();
  float q[SHARE][8], sum[SHARE][8], most[SHARE], weight[SHARE];
#pragma unroll
  for (int r = 0; r < SHARE; ++r) {
    most[r] = -1e30f, weight[r] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      q[r][j] = inside ? query[r * SIZE + part * 8 + j] * (rsqrtf((float)SIZE) * 1.4426950408889634f) : 0.f;
      sum[r][j] = 0.f;
    }
  }
  for (int first = begin; first < end; first += STEP) {
    load(first, first == begin ? here : first, end);
    float score[SHARE][AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      float k[8];
      to_floats(k, key[n]);
#pragma unroll
      for (int r = 0; r < SHARE; ++r) {
        float dot = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) dot += q[r][j] * k[j];
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        score[r][n] = first + n * TEAMS + team < end ? dot : -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < SHARE; ++r) {
      float now = most[r];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) now = fmaxf(now, score[r][n]);
      const float before = exp2f(most[r] - now);
      most[r] = now;
      weight[r] *= before;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[r][j] *= before;
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      float v[8];
      to_floats(v, value[n]);
#pragma unroll
      for (int r = 0; r < SHARE; ++r) {
        const float p = exp2f(score[r][n] - most[r]);
        weight[r] += p;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[r][j] += p * v[j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < SHARE; ++r) {  // teams of a warp become one
    float all = most[r];
#pragma unroll
    for (int mask = 16; mask >= LANES; mask >>= 1) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, mask));
    const float factor = exp2f(most[r] - all);
    weight[r] *= factor;
#pragma unroll
    for (int mask = 16; mask >= LANES; mask >>= 1) weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], mask);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum[r][j] *= factor;
#pragma unroll
      for (int mask = 16; mask >= LANES; mask >>= 1) sum[r][j] += __shfl_xor_sync(0xffffffffu, sum[r][j], mask);
    }
    if (tid % 32 == 0) warp_most[r][tid / 32] = all, warp_weight[r][tid / 32] = weight[r];
  }
#pragma unroll
  for (int round = 0; round < SHARE; round += HEADS_AT_ONCE) {
    if (round) __syncthreads();
    if (tid % 32 < LANES && inside)
#pragma unroll
      for (int r = 0; r < HEADS_AT_ONCE; ++r)
#pragma unroll
        for (int j = 0; j < 8; ++j) warp_sum[r][tid / 32][part * 8 + j] = sum[round + r][j];
    __syncthreads();
    for (int i = tid; i < HEADS_AT_ONCE * SIZE; i += THREADS) {
      const int r = i / SIZE, d = i % SIZE, head = kv_head * SHARE + round + r;
      float all = -1e30f, total = 0.f, below = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) all = fmaxf(all, warp_most[round + r][w]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float factor = exp2f(warp_most[round + r][w] - all);
        total += factor * warp_sum[r][w][d];
        below += factor * warp_weight[round + r][w];
      }
      if (active == 1) {
        out[head * SIZE + d] = __float2half(total / below);
      } else {
        float* to = partial + (head * SPLITS + split) * STRIDE;
        to[d] = total;
        if (d == 0) to[SIZE] = all, to[SIZE + 1] = below;
      }
    }
  }
  if (active == 1) return;
  __threadfence();
  __syncthreads();
  if (tid == 0) is_last = atomicAdd(counter + kv_head, 1) == active - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = tid; i < SHARE * SIZE; i += THREADS) {
    const int d = i % SIZE;
    const float* from = partial + (size_t)(kv_head * SHARE + i / SIZE) * SPLITS * STRIDE;
    float all = -1e30f, total = 0.f, below = 0.f;
#pragma unroll 4
    for (int s = 0; s < active; ++s) all = fmaxf(all, __ldcg(from + s * STRIDE + SIZE));
#pragma unroll 4
    for (int s = 0; s < active; ++s) {
      const float factor = exp2f(__ldcg(from + s * STRIDE + SIZE) - all);
      total += factor * __ldcg(from + s * STRIDE + d);
      below += factor * __ldcg(from + s * STRIDE + SIZE + 1);
    }
    out[kv_head * SHARE * SIZE + i] = __float2half(total / below);
  }
  if (tid == 0) counter[kv_head] = 0;
}
template <int HEADS, int KV_HEADS, int SIZE>
__device__ __forceinline__ void append(const half* qkv, const float* frequency, const int* position, half* keys,
                                       half* values, half* queries, int layer, int count, int capacity) {
  constexpr int HALF = SIZE / 2, CHUNKS = HALF / 8, THREADS = 256, ALL = (HEADS + 2 * KV_HEADS) * CHUNKS;
  constexpr int EACH = (ALL + THREADS - 1) / THREADS;
  __shared__ __align__(16) float sines[HALF], cosines[HALF];
  wait_for_kernel_before();
  const int s = blockIdx.x, tid = threadIdx.x, here = __ldcg(position) + s;
  uint4 low[EACH], high[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int n = min(tid + i * THREADS, ALL - 1);
    const half* from = qkv + ((size_t)s * (ALL / CHUNKS) + n / CHUNKS) * SIZE + n % CHUNKS * 8;
    low[i] = __ldcg(reinterpret_cast<const uint4*>(from));
    high[i] = __ldcg(reinterpret_cast<const uint4*>(from + HALF));
  }
  for (int d = tid; d < HALF; d += THREADS) sincosf((float)here * __ldg(frequency + d), sines + d, cosines + d);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int n = tid + i * THREADS, head = n / CHUNKS, first = n % CHUNKS * 8;
    if (n >= ALL) break;
    if (head < HEADS + KV_HEADS) {
      float a[8], b[8];
      to_floats(a, low[i]), to_floats(b, high[i]);
      unsigned* words[2] = {&low[i].x, &high[i].x};
#pragma unroll
      for (int d = 0; d < 8; d += 2) {
        const float2 sine = *reinterpret_cast<const float2*>(sines + first + d);
        const float2 cosine = *reinterpret_cast<const float2*>(cosines + first + d);
        words[0][d / 2] = as_unsigned(
            __floats2half2_rn(a[d] * cosine.x - b[d] * sine.x, a[d + 1] * cosine.y - b[d + 1] * sine.y));
        words[1][d / 2] = as_unsigned(
            __floats2half2_rn(b[d] * cosine.x + a[d] * sine.x, b[d + 1] * cosine.y + a[d + 1] * sine.y));
      }
    }
    const int kv_head = (head - HEADS) % KV_HEADS;
    half* to = head < HEADS ? queries + ((size_t)s * HEADS + head) * SIZE
                            : (head < HEADS + KV_HEADS ? keys : values) +
                                  (((size_t)layer * KV_HEADS + kv_head) * capacity + here) * SIZE;
    *reinterpret_cast<uint4*>(to + first) = low[i];
    *reinterpret_cast<uint4*>(to + HALF + first) = high[i];
  }
}
template <int HEADS, int KV_HEADS, int SIZE>
__device__ __forceinline__ void attend_many(const half* queries, const int* position, const half* keys,
                                            const half* values, half* out, int layer, int count, int capacity) {
  constexpr int KEYS = SIZE > 128 ? 32 : 64, PITCH = SIZE + 8, STEPS = SIZE / 16, TILES = KEYS / 8;
  __shared__ __align__(16) half key[KEYS * PITCH];
  __shared__ __align__(16) half value[KEYS * PITCH];
  wait_for_kernel_before();
  const int tid = threadIdx.x, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x % HEADS, row = blockIdx.x / HEADS * 64 + tid / 32 * 16 + g, before = __ldcg(position);
  const size_t head_offset = ((size_t)layer * KV_HEADS + head / (HEADS / KV_HEADS)) * capacity * SIZE;
  keys += head_offset, values += head_offset;
  unsigned query[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = row + i % 2 * 8;
      query[k][i] = s < count ? __ldcg(reinterpret_cast<const unsigned*>(
                                    queries + ((size_t)s * HEADS + head) * SIZE + k * 16 + i / 2 * 8 + 2 * t))
                              : 0u;
    }
  float sums[SIZE / 8][4] = {}, most[2] = {-1e30f, -1e30f}, weight[2] = {};
  const float factor = rsqrtf((float)SIZE) * 1.4426950408889634f;
  const int end = before + min((int)(blockIdx.x / HEADS) * 64 + 64, count);
  for (int first = 0; first < end; first += KEYS) {
    __syncthreads();
    for (int i = tid; i < KEYS * SIZE / 8; i += 128) {
      const int n = i / (SIZE / 8), d = i % (SIZE / 8) * 8;
      const bool valid = first + n < end;
      const size_t place = (size_t)(first + n) * SIZE + d;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(key + n * PITCH + d) =
          valid ? __ldcg(reinterpret_cast<const uint4*>(keys + place)) : zero;
      *reinterpret_cast<uint4*>(value + n * PITCH + d) =
          valid ? __ldcg(reinterpret_cast<const uint4*>(values + place)) : zero;
    }
    __syncthreads();
    float score[TILES][4] = {};
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const half* at = key + (n * 8 + g) * PITCH + k * 16 + 2 * t;
        multiply_add(score[n], query[k][0], query[k][1], query[k][2], query[k][3],
                     *reinterpret_cast<const unsigned*>(at), *reinterpret_cast<const unsigned*>(at + 8));
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = before + row + r * 8;
      float now = most[r], old = now;
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = first + n * 8 + 2 * t + i;
          score[n][2 * r + i] = place <= last && place < end ? score[n][2 * r + i] * factor : -INFINITY;
          now = fmaxf(now, score[n][2 * r + i]);
        }
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      const float shrink = exp2f(old - now);
      most[r] = now;
      weight[r] *= shrink;
#pragma unroll
      for (int d = 0; d < SIZE / 8; ++d) sums[d][2 * r] *= shrink, sums[d][2 * r + 1] *= shrink;
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          score[n][2 * r + i] = exp2f(score[n][2 * r + i] - now);
          weight[r] += score[n][2 * r + i];
        }
    }
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      const unsigned p0 = as_unsigned(__floats2half2_rn(score[2 * k][0], score[2 * k][1]));
      const unsigned p1 = as_unsigned(__floats2half2_rn(score[2 * k][2], score[2 * k][3]));
      const unsigned p2 = as_unsigned(__floats2half2_rn(score[2 * k + 1][0], score[2 * k + 1][1]));
      const unsigned p3 = as_unsigned(__floats2half2_rn(score[2 * k + 1][2], score[2 * k + 1][3]));
#pragma unroll
      for (int d = 0; d < SIZE / 8; ++d) {
        unsigned v0, v1;
        load_transposed(v0, v1, value + (k * 16 + lane % 16) * PITCH + d * 8);
        multiply_add(sums[d], p0, p1, p2, p3, v0, v1);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 1);
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 2);
    const int s = row + r * 8;
    if (s < count)
#pragma unroll
      for (int d = 0; d < SIZE / 8; ++d)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          out[((size_t)s * HEADS + head) * SIZE + arranged(d * 8 + 2 * t + i)] =
              __float2half(sums[d][2 * r + i] / weight[r]);
  }
}
"""


def splits(kv_heads: int) -> int:
    """Blocks that share a key-value head's positions."""
    return max(1, min(64, BLOCKS // kv_heads))


def _cache(layers: int, kv_heads: int, size: int) -> dict[str, tuple[tuple[int | str, ...], str]]:
    return dict.fromkeys(("keys", "values"), ((layers, kv_heads, "C", size), "float16"))


@cache
def attend_one(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Rotate the one position's qkv, append its key and value, and attend to all.

    Arguments: qkv, frequency [size / 2], position [1], counter [kv_heads] (zeros, and left so), keys, values, the
    layer, room for the parts of the sum, out.
    """
    parts = splits(kv_heads)
    buffers = {
        "qkv": ((1, 1, (heads + 2 * kv_heads) * size), "float16"),
        "frequency": ((size // 2,), "float32"),
        "position": ((1,), "int32"),
        "counter": ((kv_heads,), "int32"),
        **_cache(layers, kv_heads, size),
        "layer": None,
        "partial": ((heads, parts, size + 2), "float32"),
        "out": ((1, 1, heads * size), "float16"),
    }
    threads = 512 if heads <= 2 * kv_heads else 256  # those of many heads want more registers
    function = f"attend_one<{heads}, {kv_heads}, {size}, {parts}, {threads}>"
    source = once("MLC_ATTENTION", SOURCE)
    return kernel(function, source, buffers, kv_heads * parts, threads, ["layer", "C"])


@cache
def append(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Rotate qkv [1, S, …], and append keys and values.

    Arguments: qkv, frequency, position, keys, values, layer, queries.
    """
    buffers = {
        "qkv": ((1, "S", (heads + 2 * kv_heads) * size), "float16"),
        "frequency": ((size // 2,), "float32"),
        "position": ((1,), "int32"),
        **_cache(layers, kv_heads, size),
        "layer": None,
        "queries": ((1, "S", heads * size), "float16"),
    }
    function, source = f"append<{heads}, {kv_heads}, {size}>", once("MLC_ATTENTION", SOURCE)
    return kernel(function, source, buffers, lambda sizes: sizes["S"], 256, ["layer", "S", "C"])


@cache
def attend_many(layers: int, heads: int, kv_heads: int, size: int) -> PrimFunc:
    """Rotated queries [1, S, heads * size] attend to what is cached.

    Arguments: queries, position, keys, values, layer, out, arranged for a product.
    """
    buffers = {
        "queries": ((1, "S", heads * size), "float16"),
        "position": ((1,), "int32"),
        **_cache(layers, kv_heads, size),
        "layer": None,
        "out": ((1, "S", heads * size), "float16"),
    }
    function, source = f"attend_many<{heads}, {kv_heads}, {size}>", once("MLC_ATTENTION", SOURCE)
    blocks = lambda sizes: (sizes["S"] + ROWS - 1) // ROWS * heads  # noqa: E731
    return kernel(function, source, buffers, blocks, THREADS, ["layer", "S", "C"])
