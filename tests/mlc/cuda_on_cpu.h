// Enough of CUDA to run kernels' sources on a CPU: blocks one after another, a block's threads in turn on stacks of
// their own, which they leave where they wait for each other. Instructions of a warp are done from their definition in
// NVIDIA's PTX ISA.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct half {
  _Float16 value;
};
struct half2 {
  half x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Index {
  int x;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __half2float(half h) { return (float)h.value; }
inline half __float2half(float f) { return {(_Float16)f}; }
inline half2 __half2half2(half h) { return {h, h}; }
inline half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline float2 __half22float2(half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline half2 __hsub2(half2 a, half2 b) {
  return {{(_Float16)((double)a.x.value - (double)b.x.value)}, {(_Float16)((double)a.y.value - (double)b.y.value)}};
}
inline half2 __hmul2(half2 a, half2 b) {
  return {{(_Float16)((double)a.x.value * (double)b.x.value)}, {(_Float16)((double)a.y.value * (double)b.y.value)}};
}
inline half2 __hfma2(half2 a, half2 b, half2 c) {
  return {{(_Float16)((double)a.x.value * (double)b.x.value + (double)c.x.value)},
          {(_Float16)((double)a.y.value * (double)b.y.value + (double)c.y.value)}};
}
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned with_exponent(unsigned word, unsigned mask) { return (word & mask) | 0x64006400u; }
inline uint4 load_once(const uint4* p) { return *p; }
inline int atomicAdd(int* p, int more) { return (*p += more) - more; }
inline void __threadfence() {}
inline void start_next_kernel() {}
inline void wait_for_kernel_before() {}

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};
struct Multiplication {
  float (*c)[4];
  float a[2][16];
  const unsigned char* rows;
  int chunk;
};
struct Thread {
  ucontext_t start;
  jmp_buf place;
  bool begun = false, done = false;
  std::vector<char> stack = std::vector<char>(1 << 17);
  std::deque<std::vector<Copy>> copies;  // done at once or as late as may be
  std::deque<std::vector<Multiplication>> groups;  // done as late as may be
};
struct Meeting {
  int alive, arrived = 0, number = 0;
};
static std::vector<std::unique_ptr<Thread>> threads;
static std::vector<Meeting> warps;
static Meeting block;
static jmp_buf scheduler;
static int current;
static Index threadIdx, blockIdx, gridDim;
static const std::function<void()>* body;
static struct {
  uint64_t values[6][32];
} slots[32];
static struct {
  float a[16][16], b[8][16];
} matrices[32];

inline void release(Meeting& meeting) {
  if (meeting.arrived && meeting.arrived == meeting.alive) meeting.arrived = 0, ++meeting.number;
}
inline void meet(Meeting& meeting) {
  const int number = meeting.number;
  ++meeting.arrived;
  release(meeting);
  while (meeting.number == number)
    if (!_setjmp(threads[current]->place)) _longjmp(scheduler, 1);
}
inline void __syncthreads() { meet(block); }
inline void meet_warp() { meet(warps[threadIdx.x / 32]); }
inline uint64_t& slot(int n, int lane) { return slots[threadIdx.x / 32].values[n][lane]; }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  memcpy(&slot(0, lane), &value, sizeof value);
  meet_warp();
  memcpy(&value, &slot(0, lane ^ mask), sizeof value);
  meet_warp();
  return value;
}
inline float half_of(unsigned pair, int n) {
  const uint16_t bits = pair >> 16 * n;
  half h;
  memcpy(&h, &bits, 2);
  return __half2float(h);
}
// the last of the groups is open
template <typename T>
void commit(T& groups) {
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
template <int LEFT, typename T, typename F>
void wait(T& groups, const F& carry_out) {
  for (; groups.size() > LEFT + 1; groups.pop_front())
    for (const auto& todo : groups.front()) carry_out(todo);
}
inline void multiply_add(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
  auto& shared = matrices[threadIdx.x / 32];
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  for (int i = 0; i < 2; ++i) {
    for (int n = 0; n < 4; ++n) shared.a[n % 2 * 8 + g][n / 2 * 8 + t + i] = half_of(a[n], i);
    for (int n = 0; n < 2; ++n) shared.b[g][n * 8 + t + i] = half_of(b[n], i);
  }
  meet_warp();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) c[i] += shared.a[i / 2 * 8 + g][k] * shared.b[t + i % 2][k];
  meet_warp();
}
inline void multiply_add_group(float (&c)[16][4], const unsigned (&a)[4], const void* rows, int chunk) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
  auto& shared = matrices[threadIdx.x / 32];
  for (int n = 0; n < 4; ++n)
    for (int i = 0; i < 2; ++i) shared.a[n % 2 * 8 + g][n / 2 * 8 + t + i] = half_of(a[n], i);
  meet_warp();
  auto& groups = threads[current]->groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({c, {}, (const unsigned char*)rows, chunk});
  for (int r = 0; r < 2; ++r) memcpy(groups.back().back().a[r], shared.a[r * 8 + g], sizeof shared.a[0]);
  meet_warp();
}
inline void commit_groups() { commit(threads[current]->groups); }
template <int LEFT>
void wait_for_groups() {
  const int t = threadIdx.x % 4 * 2;
  wait<LEFT>(threads[current]->groups, [&](const Multiplication& todo) {
    for (int n = 0; n < 16; ++n)
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + t + j;
        half b[16];
        for (int k = 0; k < 2; ++k) memcpy(b + k * 8, todo.rows + row * 128 + ((todo.chunk + k) ^ row % 8) * 16, 16);
        for (int r = 0; r < 2; ++r)
          for (int k = 0; k < 16; ++k) todo.c[n][r * 2 + j] += todo.a[r][k] * __half2float(b[k]);
      }
  });
}
inline void fence_groups() {}
inline void fence_copies() {}
template <int N>
void keep(unsigned (&)[N][2][4]) {}
inline void load_transposed(unsigned& r0, unsigned& r1, const half* row) {
  const int lane = threadIdx.x % 32;
  slot(0, lane) = (uint64_t)row;
  meet_warp();
  unsigned* results[2] = {&r0, &r1};
  for (int i = 0; i < 2; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) memcpy(&pair[j], (const half*)slot(0, i * 8 + lane % 4 * 2 + j) + lane / 4, 2);
    *results[i] = pair[0] | (unsigned)pair[1] << 16;
  }
  meet_warp();
}

inline void load_matrices(unsigned (&r)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  slot(0, lane) = (uint64_t)row;
  meet_warp();
  for (int i = 0; i < 4; ++i) memcpy(&r[i], (const unsigned*)slot(0, i * 8 + lane / 4) + lane % 4, 4);
  meet_warp();
}
inline void carry_out(const Copy& copy) {
  memset(copy.to, 0, copy.bytes);
  if (copy.valid) memcpy(copy.to, copy.from, copy.bytes);
}
template <int BYTES>
void copy_async(void* to, const void* from, bool valid) {
  static unsigned random = 1;
  random = random * 1664525 + 1013904223;
  auto& copies = threads[current]->copies;
  if (copies.empty()) copies.emplace_back();
  const Copy copy = {to, from, BYTES, valid};
  random >> 31 ? carry_out(copy) : copies.back().push_back(copy);
}
inline void commit_copies() { commit(threads[current]->copies); }
template <int LEFT>
void wait_for_copies() {
  wait<LEFT>(threads[current]->copies, carry_out);
}
inline unsigned char* shared_bytes(int count) {
  static std::vector<unsigned char> bytes;
  bytes.assign(count, 255);  // not a number, until something is written
  return bytes.data();
}

static void enter() {
  (*body)();
  threads[current]->done = true;
  --block.alive, --warps[current / 32].alive;
  release(block), release(warps[current / 32]);
  _longjmp(scheduler, 1);
}
static void run_blocks(int grid, int count, const std::function<void()>& kernel) {
  body = &kernel;
  while ((int)threads.size() < count) threads.push_back(std::make_unique<Thread>());
  for (int number = 0; number < grid; ++number) {
    gridDim.x = grid;
    block = {count};
    warps.assign(count / 32, {32});
    for (int i = 0; i < count; ++i) threads[i]->begun = threads[i]->done = false, threads[i]->copies.clear(), threads[i]->groups.clear();
    volatile int left = count;
    while (left) {
      left = 0;
      for (volatile int i = 0; i < count; ++i) {
        Thread& thread = *threads[i];
        if (thread.done) continue;
        left = left + 1;
        current = i, threadIdx.x = i, blockIdx.x = number;
        if (_setjmp(scheduler)) continue;
        if (thread.begun) _longjmp(thread.place, 1);
        thread.begun = true;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.data();
        thread.start.uc_stack.ss_size = thread.stack.size();
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, enter, 0);
        setcontext(&thread.start);
      }
    }
  }
}
