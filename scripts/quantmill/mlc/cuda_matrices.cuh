// 2 weights of a row from a word: (nibble - 7) * scale in float16, as the format says; 0x6400 is 1024, of which a
// nibble is the last bits, or 16 times it (lop3 and magic numbers: Kim et al. 2022, arXiv 2211.10017)
__device__ __forceinline__ unsigned low_pair(unsigned word, half2 scale) {
  const half2 v = __hsub2(as_half2(with_exponent(word, 0x000f000fu)), as_half2(0x64076407u));
  return as_unsigned(__hmul2(v, scale));
}
__device__ __forceinline__ unsigned high_pair(unsigned word, half2 scale) {
  const half2 v = __hfma2(as_half2(with_exponent(word, 0x00f000f0u)), as_half2(0x2c002c00u), as_half2(0xd470d470u));
  return as_unsigned(__hmul2(v, scale));
}
// a thread's chunks of 8 of a row, and with NORM one over the row's root mean square
template <int SIZE, int THREADS, bool NORM, int EACH>
__device__ __forceinline__ float load_row(uint4 (&chunk)[EACH], const half* x, float epsilon) {
  const int tid = threadIdx.x;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = tid + i * THREADS;
    chunk[i] = make_uint4(0, 0, 0, 0);
    if (c < SIZE / 8) chunk[i] = __ldcg(reinterpret_cast<const uint4*>(x) + c);
    if (NORM) {
      float f[8];
      to_floats(f, chunk[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += f[j] * f[j];
    }
  }
  float factor = 1.f;
  if (NORM) {
    __shared__ float sums[THREADS / 32];
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (tid % 32 == 0) sums[tid / 32] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum += sums[i];
    factor = rsqrtf(sum / SIZE + epsilon);
  }
  return factor;
}
template <int INPUTS, int THREADS, bool NORM>
__device__ __forceinline__ void vector_to_shared(half* shared, const half* x, const half* norm, float epsilon) {
  constexpr int CHUNKS = INPUTS / 8, EACH = (CHUNKS + THREADS - 1) / THREADS;
  const int tid = threadIdx.x;
  uint4 chunk[EACH];
  const float factor = load_row<INPUTS, THREADS, NORM>(chunk, x, epsilon);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = tid + i * THREADS;
    if (c < CHUNKS) {
      uint4 v = chunk[i];
      if (NORM) {
        float f[8], w[8];
        to_floats(f, v);
        to_floats(w, __ldg(reinterpret_cast<const uint4*>(norm) + c));
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] *= factor * w[j];
        v = make_uint4(as_unsigned(__floats2half2_rn(f[0], f[1])), as_unsigned(__floats2half2_rn(f[2], f[3])),
                       as_unsigned(__floats2half2_rn(f[4], f[5])), as_unsigned(__floats2half2_rn(f[6], f[7])));
      }
      // 80 bytes a group: four lanes' groups then lie in different banks
      reinterpret_cast<uint4*>(shared)[c / 4 * 5 + c % 4] =
          make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                     __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
    }
  }
  __syncthreads();
}
// EPILOGUE 0: product; 1: product + add; 2: SiLU(first half of the rows) * second half
// A block takes every gridDim.x-th tile of rows: the vector is read and normed once, and bytes stay under way.
template <int OUTPUTS, int INPUTS, int WARPS, bool NORM, int EPILOGUE>
__device__ __forceinline__ void matrix_vector(const half* x, const uint4* weight, const half* scale, const half* norm,
                                              const half* add, half* out, float epsilon) {
  constexpr int GROUPS = INPUTS / 32, STEPS = (GROUPS + 4 * WARPS - 1) / (4 * WARPS);
  constexpr int ROWS = EPILOGUE == 2 ? 8 : 16, RESULTS = EPILOGUE == 2 ? OUTPUTS / 2 : OUTPUTS;
  constexpr int TILES = (RESULTS + ROWS - 1) / ROWS;
  __shared__ __align__(16) half shared[GROUPS * 40];
  __shared__ float partial[2][WARPS][16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  struct Stage {
    uint4 words[2];
    half scales[2];
  } one, two;  // each loaded while the other is used
  const auto load = [&](Stage& stage, int tile, int step) {
    const int first = tile * ROWS + lane / 4, second = first + (EPILOGUE == 2 ? RESULTS : 8);
    const int rows[2] = {min(first, OUTPUTS - 1), min(second, OUTPUTS - 1)};
    const int group = (step * WARPS + warp) * 4 + lane % 4;
    const bool valid = group < GROUPS && tile < TILES;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = rows[r] * GROUPS + group;
      stage.words[r] = make_uint4(0, 0, 0, 0);
      stage.scales[r] = __float2half(0.f);
      if (valid) {
        stage.words[r] = load_once(weight + place);
        stage.scales[r] = __ldg(scale + place);
      }
    }
  };
  float sums[2][4];
  const auto multiply = [&](const Stage& stage, int step) {
    const int group = (step * WARPS + warp) * 4 + lane % 4;
    const uint4* values = reinterpret_cast<const uint4*>(shared) + (group < GROUPS ? group : 0) * 5;
    const half2 s0 = __half2half2(stage.scales[0]), s1 = __half2half2(stage.scales[1]);
    const uint4 first = stage.words[0], second = stage.words[1];
    const unsigned w0[4] = {first.x, first.y, first.z, first.w}, w1[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = values[j];
      multiply_add(sums[0], low_pair(w0[j], s0), low_pair(w1[j], s1), high_pair(w0[j], s0), high_pair(w1[j], s1),
                   v.x, v.y);
      const unsigned u0 = w0[j] >> 8, u1 = w1[j] >> 8;
      multiply_add(sums[1], low_pair(u0, s0), low_pair(u1, s1), high_pair(u0, s0), high_pair(u1, s1), v.z, v.w);
    }
  };
  load(one, blockIdx.x, 0);
  wait_for_kernel_before();
  vector_to_shared<INPUTS, WARPS * 32, NORM>(shared, x, norm, epsilon);
  int buffer = 0;  // of two, so that no warp waits until the sums before are read
  for (int tile = blockIdx.x; tile < TILES; tile += gridDim.x, buffer ^= 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll 2
    for (int step = 0; step < STEPS; step += 2) {
      load(two, tile, step + 1);
      multiply(one, step);
      const bool last = step + 2 >= STEPS;
      load(one, last ? tile + gridDim.x : tile, last ? 0 : step + 2);
      if (step + 1 < STEPS) multiply(two, step + 1);
    }
    if (lane % 4 == 0) {
      partial[buffer][warp][lane / 4] = sums[0][0] + sums[1][0];
      partial[buffer][warp][lane / 4 + 8] = sums[0][2] + sums[1][2];
    }
    __syncthreads();
    const int result = tile * ROWS + threadIdx.x;
    if (threadIdx.x < ROWS && result < RESULTS) {
      float total = 0.f, up = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += partial[buffer][w][threadIdx.x];
      if (EPILOGUE == 1) total += __half2float(__ldcg(add + result));
      if (EPILOGUE == 2) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) up += partial[buffer][w][threadIdx.x + 8];
        total = total / (1.f + __expf(-total)) * up;
      }
      out[result] = __float2half(total);
    }
  }
}
