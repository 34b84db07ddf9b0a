// What the kernels share. The instructions alone are left out on a CPU (tests/mlc/cuda_on_cpu.h has its own).
#ifdef __CUDACC__
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
  start_next_kernel();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// word & mask | 0x64006400 in one instruction, where the compiler makes two
__device__ __forceinline__ unsigned with_exponent(unsigned word, unsigned mask) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(0x64006400u));
  return result;
}
// c [16, 8] += a [16, 16] b [16, 8]; PTX ISA, mma.m16n8k16
__device__ __forceinline__ void multiply_add(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// two 8x8 matrices, transposed; lane i of the first 16 names row i
__device__ __forceinline__ void load_transposed(unsigned& r0, unsigned& r1, const half* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}
// four 8x8 matrices; lane i names row i % 8 of matrix i / 8
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// BYTES from global to shared memory while other work goes on, or zeros; committed copies are waited for in order
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(address), "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MLC_WARPGROUPS 1
#else
#define MLC_WARPGROUPS 0
#endif
// of four warps: c [64, 128] += a [64, 16] b [16, 128], of which a warp has 16 rows as in multiply_add; b is read from
// rows of 128 bytes at `rows`, from 16-byte chunk `chunk` on, swizzled (PTX ISA, wgmma: matrix descriptor)
__device__ __forceinline__ void multiply_add_group(
    float (&c)[16][4], const unsigned (&a)[4], const void* rows, int chunk) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(rows) + chunk * 16;
  const unsigned long long b = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3ffff) >> 4);
#define MLC_FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"
      "%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
      : MLC_FOUR(0), MLC_FOUR(1), MLC_FOUR(2), MLC_FOUR(3), MLC_FOUR(4), MLC_FOUR(5), MLC_FOUR(6), MLC_FOUR(7),
        MLC_FOUR(8), MLC_FOUR(9), MLC_FOUR(10), MLC_FOUR(11), MLC_FOUR(12), MLC_FOUR(13), MLC_FOUR(14), MLC_FOUR(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#undef MLC_FOUR
}
__device__ __forceinline__ void fence_groups() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_groups() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
// what copies wrote is seen by multiply_add_group
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// registers that multiply_add_group may still be reading are not used for anything else up to here
template <int N>
__device__ __forceinline__ void keep(unsigned (&values)[N][2][4]) {
#pragma unroll
  for (int i = 0; i < N * 8; ++i) asm volatile("" : "+r"(values[i / 8][i / 4 % 2][i % 4]) :: "memory");
}
// weights are read once: they go past the first cache, and whole lines into the second
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
#endif
// where element e of a row lies that a product reads: 32 are a matrix [8, 4], transposed (cuda_products.cuh)
__device__ __forceinline__ int arranged(int e) { return e / 32 * 32 + e % 4 * 8 + e % 32 / 4; }
__device__ __forceinline__ half2 as_half2(unsigned v) { return *reinterpret_cast<half2*>(&v); }
__device__ __forceinline__ unsigned as_unsigned(half2 v) { return *reinterpret_cast<unsigned*>(&v); }
__device__ __forceinline__ void to_floats(float* out, uint4 v) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(as_half2(words[i]));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}
