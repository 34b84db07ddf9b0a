// A quantized matrix times many positions, by tensor cores (mma.m16n8k16, float32 sums).
//
// The matrix is the left operand: a warp takes 64 rows of it through TILES * 8 positions. In a step a warp has
// DEPTH groups of 32 inputs, and WARPS_K warps have others. Of a row's group lane % 4 says the word: its nibbles
// 0 4 1 5 2 6 3 7, which is how they come out, are the inputs that the instruction wants of that lane where positions
// lie as arranged() says. Words, scales and positions come into shared memory some steps ahead.
//
// Where there are instructions for four warps (wgmma), these take 128 rows through 128 positions, which they read from
// shared memory themselves, while the next rows are dequantized.
enum { PLAIN, BIAS, RESIDUAL, GATE };

template <int OUTPUTS, int INPUTS, int EPILOGUE, int WARPS_M, int WARPS_N, int WARPS_K, int DEPTH, int TILES,
          int STAGES>
__device__ __forceinline__ void product(const half* x, const unsigned* weight, const half* scale, const half* add,
                                        half* out, int count, unsigned char* shared) {
  shared += (1024 - reinterpret_cast<size_t>(shared) % 1024) % 1024;  // where the pattern of banks begins
  constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K, ROWS = 64 * WARPS_M, TOKENS = 8 * TILES * WARPS_N;
  constexpr int GROUPS = INPUTS / 32, WIDTH = WARPS_K * DEPTH, STEPS = (GROUPS + WIDTH - 1) / WIDTH;
  constexpr int RESULTS = EPILOGUE == GATE ? OUTPUTS / 2 : OUTPUTS, TILE_RESULTS = EPILOGUE == GATE ? ROWS / 2 : ROWS;
  constexpr int X_BYTES = TOKENS * WIDTH * 64, WORD_BYTES = ROWS * WIDTH * 16, SCALE_BYTES = ROWS * WIDTH * 2;
  constexpr int WORDS_AT = STAGES * X_BYTES, SCALES_AT = WORDS_AT + STAGES * WORD_BYTES;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  constexpr bool GROUPED = MLC_WARPGROUPS && WARPS_M % 2 == 0 && WARPS_N == 2 && TILES == 8;
  constexpr int ROW_TILES = GROUPED ? 2 : 4, TOKEN_TILES = GROUPED ? 16 : TILES;
  constexpr int AHEAD = GROUPED ? STAGES - 2 : STAGES - 1;  // a step's reads go on in the next one
  const int warp_k = warp / (WARPS_M * WARPS_N), warp_n = GROUPED ? 0 : warp / WARPS_M % WARPS_N;
  const int first_row = GROUPED ? warp / 4 % (WARPS_M / 2) * 128 + warp % 4 * 16 : warp % WARPS_M * 64;
  // blocks beside each other share rows, as positions are what a cache has room for
  const int token_tiles = (count + TOKENS - 1) / TOKENS, first_token = blockIdx.x % token_tiles * TOKENS;
  const int first_result = blockIdx.x / token_tiles * TILE_RESULTS;
  const auto row_of = [&](int r) {  // of a gate, half of a block's rows are those that multiply the others
    return min(first_result + (r < TILE_RESULTS ? r : RESULTS - TILE_RESULTS + r), OUTPUTS - 1);
  };
  const auto load_weights = [&](int step) {
    unsigned char* words = shared + WORDS_AT + step % STAGES * WORD_BYTES;
#pragma unroll
    for (int i = 0; i < (ROWS * WIDTH + THREADS - 1) / THREADS; ++i) {
      const int n = tid + i * THREADS, r = n / WIDTH, k = n % WIDTH, group = step * WIDTH + k;
      if ((ROWS * WIDTH) % THREADS && n >= ROWS * WIDTH) break;
      const bool valid = GROUPS % WIDTH == 0 || group < GROUPS;
      const size_t place = (size_t)row_of(r) * GROUPS + (valid ? group : 0);
      copy_async<16>(words + (k * ROWS + r) * 16, weight + 4 * place, valid);
      if (GROUPS % WIDTH) {
        half* to = reinterpret_cast<half*>(shared + SCALES_AT + step % STAGES * SCALE_BYTES) + r * WIDTH + k;
        *to = valid ? __ldg(scale + place) : __float2half(0.f);
      }
    }
    if (GROUPS % WIDTH == 0 && tid < ROWS)
      copy_async<2 * WIDTH>(shared + SCALES_AT + step % STAGES * SCALE_BYTES + tid * 2 * WIDTH,
                              scale + (size_t)row_of(tid) * GROUPS + step * WIDTH, true);
  };
  const auto load_x = [&](int step) {
    unsigned char* to = shared + step % STAGES * X_BYTES;
#pragma unroll
    for (int i = 0; i < TOKENS * WIDTH * 4 / THREADS; ++i) {
      const int n = tid + i * THREADS, token = n / (4 * WIDTH), chunk = n % (4 * WIDTH);
      const int group = step * WIDTH + chunk / 4;
      const bool valid = GROUPS % WIDTH == 0 || group < GROUPS;
      const half* from = x + (size_t)min(first_token + token, count - 1) * INPUTS + (valid ? group * 32 : 0);
      // 128 bytes a position, in which eight positions' chunks of 16 bytes lie in different banks
      copy_async<16>(to + (chunk / 8 * TOKENS + token) * 128 + (chunk % 8 ^ token % 8) * 16, from + chunk % 4 * 8,
                     valid);
    }
  };
  float sums[ROW_TILES][TOKEN_TILES][4] = {};
  unsigned left[DEPTH][ROW_TILES][2][4] = {};
  const auto dequantize = [&](int step, int k, unsigned (&left)[2][4], int row) {
    const unsigned char* words = shared + WORDS_AT + step % STAGES * WORD_BYTES;
    const unsigned char* scales = shared + SCALES_AT + step % STAGES * SCALE_BYTES;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned word = *reinterpret_cast<const unsigned*>(words + (k * ROWS + row + r * 8 + g) * 16 + t * 4);
      const half2 s = __half2half2(*reinterpret_cast<const half*>(scales + ((row + r * 8 + g) * WIDTH + k) * 2));
      left[0][r] = low_pair(word, s), left[0][r + 2] = high_pair(word, s);
      left[1][r] = low_pair(word >> 8, s), left[1][r + 2] = high_pair(word >> 8, s);
    }
  };
  const auto multiply = [&](int step, int i) {
    const int k = warp_k * DEPTH + i;
    const unsigned char* values = shared + step % STAGES * X_BYTES + k / 2 * TOKENS * 128;
    if constexpr (GROUPED) {
      wait_for_groups<DEPTH - 1>();
      keep(left[i]);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) dequantize(step, k, left[i][m], first_row + m * 64);
      fence_groups();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) multiply_add_group(sums[m], left[i][m][h], values, k % 2 * 4 + h * 2);
      commit_groups();
    } else {
      unsigned value[TILES][4];
      values += (warp_n * TILES * 8 + lane % 8) * 128 + ((k % 2 * 4 + lane / 8) ^ lane % 8) * 16;
#pragma unroll
      for (int n = 0; n < TILES; ++n) load_matrices(value[n], values + n * 1024);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        dequantize(step, k, left[i][m], first_row + m * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned* a = left[i][m][h];
#pragma unroll
          for (int n = 0; n < TILES; ++n)
            multiply_add(sums[m][n], a[0], a[1], a[2], a[3], value[n][2 * h], value[n][2 * h + 1]);
        }
      }
    }
  };
#pragma unroll
  for (int step = 0; step < AHEAD; ++step)
    if (step < STEPS) load_weights(step);
  wait_for_kernel_before();
#pragma unroll
  for (int step = 0; step < AHEAD; ++step) {
    if (step < STEPS) load_x(step);
    commit_copies();
  }
  for (int step = 0; step < STEPS; ++step) {
    wait_for_copies<AHEAD - 1>();
    if (GROUPED) fence_copies();
    __syncthreads();
    const int next = step + AHEAD;
    if (next < STEPS) load_weights(next), load_x(next);
    commit_copies();
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) multiply(step, i);
  }
  if constexpr (GROUPED) {
    wait_for_groups<0>();
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) keep(left[i]);
  }
  constexpr int PITCH = ROWS + 4;  // lanes' sums then lie in different banks
  float* tile = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int k = WARPS_K - 1; k >= 0; --k) {
    __syncthreads();
    if (warp_k == k)
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = (warp_n * TILES + n) * 8 + 2 * t + i % 2;
            const int row = first_row + m * (GROUPED ? 64 : 16) + i / 2 * 8 + g;
            float* to = tile + token * PITCH + row;
            *to = k == WARPS_K - 1 ? sums[m][n][i] : *to + sums[m][n][i];
          }
  }
  __syncthreads();
#pragma unroll 2
  for (int n = tid; n < TOKENS * TILE_RESULTS / 8; n += THREADS) {
    const int token = n / (TILE_RESULTS / 8), r = n % (TILE_RESULTS / 8) * 8;
    const int s = first_token + token, result = first_result + r;
    if (s >= count || result >= RESULTS) continue;
    const float* from = tile + token * PITCH;
    const size_t place = (size_t)s * RESULTS + result;
    float total[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (EPILOGUE == GATE) {  // arranged, as these are what another product reads
        const int row = r / 32 * 32 + i * 4 + r / 8 % 4;
        const float gate = from[row], up = from[row + TILE_RESULTS];
        total[i] = gate / (1.f + __expf(-gate)) * up;
      } else {
        total[i] = from[r + i];
      }
    }
    if constexpr (RESULTS % 8 == 0) {
      if (EPILOGUE == BIAS || EPILOGUE == RESIDUAL) {
        float more[8];
        to_floats(more, __ldcg(reinterpret_cast<const uint4*>(add + (EPILOGUE == BIAS ? result : place))));
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] += more[i];
      }
      *reinterpret_cast<uint4*>(out + place) = make_uint4(
          as_unsigned(__floats2half2_rn(total[0], total[1])), as_unsigned(__floats2half2_rn(total[2], total[3])),
          as_unsigned(__floats2half2_rn(total[4], total[5])), as_unsigned(__floats2half2_rn(total[6], total[7])));
    } else {
      for (int i = 0; i < 8 && result + i < RESULTS; ++i) {
        if (EPILOGUE == BIAS || EPILOGUE == RESIDUAL)
          total[i] += __half2float(__ldcg(add + (EPILOGUE == BIAS ? result : place) + i));
        out[place + i] = __float2half(total[i]);
      }
    }
  }
}

// x over its root mean square, times the norm's weight, arranged for a product; a block for a position
template <int SIZE>
__device__ __forceinline__ void rms_norm(const half* x, const half* norm, half* out, float epsilon) {
  constexpr int THREADS = 128, CHUNKS = SIZE / 8, EACH = (CHUNKS + THREADS - 1) / THREADS;
  const int tid = threadIdx.x;
  wait_for_kernel_before();
  x += (size_t)blockIdx.x * SIZE, out += (size_t)blockIdx.x * SIZE;
  uint4 chunk[EACH];
  const float factor = load_row<SIZE, THREADS, true>(chunk, x, epsilon);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int c = tid + i * THREADS;
    if (c >= CHUNKS) continue;
    float f[8], w[8];
    to_floats(f, chunk[i]);
    to_floats(w, __ldg(reinterpret_cast<const uint4*>(norm) + c));
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] *= factor * w[j];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<unsigned*>(out + arranged(c * 8 + j)) = as_unsigned(__floats2half2_rn(f[j], f[j + 4]));
  }
}
