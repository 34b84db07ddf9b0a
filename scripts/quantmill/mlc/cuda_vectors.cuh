template <int VOCABULARY>
__device__ __forceinline__ void choose(const half* logits, const float* bias, int* token, int* position, int count) {
  __shared__ float values[32];
  __shared__ int places[32];
  wait_for_kernel_before();
  constexpr int VECTOR = VOCABULARY % 8 ? 1 : 8;
  float best = -INFINITY;
  int place = 0x7fffffff;
#pragma unroll 4
  for (int n = threadIdx.x * VECTOR; n < VOCABULARY; n += 1024 * VECTOR) {
    float found[VECTOR];
    if constexpr (VECTOR == 8) {
      to_floats(found, __ldcg(reinterpret_cast<const uint4*>(logits + n)));
      const float4 low = __ldg(reinterpret_cast<const float4*>(bias + n));
      const float4 high = __ldg(reinterpret_cast<const float4*>(bias + n) + 1);
      const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) found[i] += more[i];
    } else {
      found[0] = __half2float(__ldcg(logits + n)) + __ldg(bias + n);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      if (found[i] > best) best = found[i], place = n + i;
  }
  const auto reduce = [&]() {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) {
      const float value = __shfl_xor_sync(0xffffffffu, best, mask);
      const int other = __shfl_xor_sync(0xffffffffu, place, mask);
      if (value > best || (value == best && other < place)) best = value, place = other;
    }
  };
  reduce();
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best, places[threadIdx.x / 32] = place;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = values[threadIdx.x], place = places[threadIdx.x];
    reduce();
    if (threadIdx.x == 0) {
      token[0] = place < VOCABULARY ? place : 0;
      position[0] += count;
    }
  }
}
