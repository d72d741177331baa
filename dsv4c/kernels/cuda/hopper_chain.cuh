// Products of a warpgroup for the 128 columns that share a scale of the inputs (hopper.cuh), all at once. Each is one
// statement from the fence to the wait: the compiler can put nothing between that would make it wait after every product.
#pragma once

#include "hopper.cuh"

// b: the low word of `product_operand` of the first block of B (32 x N), warp-uniform for the compiler's sake. The blocks
// lie one after the other, and in a block eight columns beside the next (128 bytes).
constexpr u32 NEXT_EIGHT = 128 >> 4;
template <int N>
constexpr u32 BLOCK_STEP = 32 * N >> 4;

// Blocks at a time whose products have scales of their own: as many as registers allow.
template <int N>
constexpr int SEPARATE = N == 8 ? 4 : 2;

// d[q] = a[q] b[q].
template <int N>
__device__ __forceinline__ void separate_products(float (&d)[SEPARATE<N>][N / 2], const u32 (&a)[SEPARATE<N>][4], u32 b);
// d = the sum of a[q] b[q].
template <int N>
__device__ __forceinline__ void chained_products(float (&d)[N / 2], const u32 (&a)[4][4], u32 b);

#ifdef DSV4C_EMULATE
inline u64 block_operand(u32 b) { return (u64)NEXT_EIGHT << 32 | b; }
template <int N>
void separate_products(float (&d)[SEPARATE<N>][N / 2], const u32 (&a)[SEPARATE<N>][4], u32 b) {
  product_begin();
  for (int q = 0; q < SEPARATE<N>; q++)
    emulated_warpgroup_product(d[q], N, a[q], block_operand(b + q * BLOCK_STEP<N>), false);
  product_commit();
  product_wait<0>();
}
template <int N>
void chained_products(float (&d)[N / 2], const u32 (&a)[4][4], u32 b) {
  product_begin();
  for (int q = 0; q < 4; q++) emulated_warpgroup_product(d, N, a[q], block_operand(b + q * BLOCK_STEP<N>), q > 0);
  product_commit();
  product_wait<0>();
}
#else
template <>
__device__ __forceinline__ void separate_products<8>(float (&d)[4][4], const u32 (&a)[4][4], u32 b) {
  constexpr u32 STEP = BLOCK_STEP<8>;
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.u32 add, 0, 0;\n.reg .b64 e0, e1, e2, e3;\n"
      "mov.b64 e0, {%32, 8};\nmov.b64 e1, {%33, 8};\n"
      "mov.b64 e2, {%34, 8};\nmov.b64 e3, {%35, 8};\n"
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%16, %17, %18, %19}, e0, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%4, %5, %6, %7}, "
      "{%20, %21, %22, %23}, e1, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%8, %9, %10, %11}, "
      "{%24, %25, %26, %27}, e2, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%12, %13, %14, %15}, "
      "{%28, %29, %30, %31}, e3, add, 1, 1;\n"
      "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
      : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]),
        "=f"(d[1][3]), "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3]), "=f"(d[3][0]), "=f"(d[3][1]),
        "=f"(d[3][2]), "=f"(d[3][3])
      : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),
        "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]),
        "r"(a[3][2]), "r"(a[3][3]), "r"(b), "r"(b + 1 * STEP), "r"(b + 2 * STEP), "r"(b + 3 * STEP)
      : "memory");
}
template <>
__device__ __forceinline__ void chained_products<8>(float (&d)[4], const u32 (&a)[4][4], u32 b) {
  constexpr u32 STEP = BLOCK_STEP<8>;
  asm volatile(
      "{\n.reg .pred add, more;\nsetp.ne.u32 add, 0, 0;\nsetp.eq.u32 more, 0, 0;\n.reg .b64 e0, e1, e2, e3;\n"
      "mov.b64 e0, {%20, 8};\nmov.b64 e1, {%21, 8};\n"
      "mov.b64 e2, {%22, 8};\nmov.b64 e3, {%23, 8};\n"
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, e0, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%8, %9, %10, %11}, e1, more, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%12, %13, %14, %15}, e2, more, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, "
      "{%16, %17, %18, %19}, e3, more, 1, 1;\n"
      "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),
        "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]),
        "r"(a[3][2]), "r"(a[3][3]), "r"(b), "r"(b + 1 * STEP), "r"(b + 2 * STEP), "r"(b + 3 * STEP)
      : "memory");
}
template <>
__device__ __forceinline__ void separate_products<16>(float (&d)[2][8], const u32 (&a)[2][4], u32 b) {
  constexpr u32 STEP = BLOCK_STEP<16>;
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.u32 add, 0, 0;\n.reg .b64 e0, e1;\n"
      "mov.b64 e0, {%24, 8};\nmov.b64 e1, {%25, 8};\n"
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%16, %17, %18, %19}, e0, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%20, %21, %22, %23}, e1, add, 1, 1;\n"
      "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
      : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[0][4]), "=f"(d[0][5]), "=f"(d[0][6]),
        "=f"(d[0][7]), "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3]), "=f"(d[1][4]), "=f"(d[1][5]),
        "=f"(d[1][6]), "=f"(d[1][7])
      : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),
        "r"(a[1][3]), "r"(b), "r"(b + 1 * STEP)
      : "memory");
}
template <>
__device__ __forceinline__ void chained_products<16>(float (&d)[8], const u32 (&a)[4][4], u32 b) {
  constexpr u32 STEP = BLOCK_STEP<16>;
  asm volatile(
      "{\n.reg .pred add, more;\nsetp.ne.u32 add, 0, 0;\nsetp.eq.u32 more, 0, 0;\n.reg .b64 e0, e1, e2, e3;\n"
      "mov.b64 e0, {%24, 8};\nmov.b64 e1, {%25, 8};\n"
      "mov.b64 e2, {%26, 8};\nmov.b64 e3, {%27, 8};\n"
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, e0, add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%12, %13, %14, %15}, e1, more, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%16, %17, %18, %19}, e2, more, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%20, %21, %22, %23}, e3, more, 1, 1;\n"
      "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
      : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),
        "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]),
        "r"(a[3][2]), "r"(a[3][3]), "r"(b), "r"(b + 1 * STEP), "r"(b + 2 * STEP), "r"(b + 3 * STEP)
      : "memory");
}
#endif
