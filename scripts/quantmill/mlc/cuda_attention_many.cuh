// Many positions: rotated and appended, then attended to by tensor cores.
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
