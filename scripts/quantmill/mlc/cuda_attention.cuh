// One position: flash-decoding.
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
