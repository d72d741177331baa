// Four products of a warpgroup with N columns each, 8 or 16 (hopper.cuh), for the 128 columns that share a scale of the
// inputs. One statement from the fence to the wait: the compiler can put nothing between that would make it wait after
// every one.
#pragma once

#include "hopper.cuh"

// From one block of B (32 x N, core matrices of 128 bytes) to the next.
template <int N>
constexpr u32 BLOCK_STEP = 32 * N >> 4;

// d[q] = a[q] b[q]. b: the low word of `product_operand` of the first block of B, warp-uniform for the compiler's sake.
template <int N>
__device__ __forceinline__ void four_products(float (&d)[4][N / 2], const u32 (&a)[4][4], u32 b);

#ifdef DSV4C_EMULATE
template <int N>
void four_products(float (&d)[4][N / 2], const u32 (&a)[4][4], u32 b) {
  product_begin();
  for (int q = 0; q < 4; q++)
    emulated_warpgroup_product(d[q], N, a[q], (u64)(128 >> 4) << 32 | (b + q * BLOCK_STEP<N>), false);
  product_commit();
  product_wait<0>();
}
#else
// The statement has the operands d, a and b in this order, each from the first q to the last.
#define FOUR_PRODUCTS_BEGIN(E0, E1, E2, E3)                                                              \
  "{\n.reg .pred add;\nsetp.ne.u32 add, 0, 0;\n.reg .b64 e0, e1, e2, e3;\n"                              \
  "mov.b64 e0, {%" #E0 ", 8};\nmov.b64 e1, {%" #E1 ", 8};\n"                                             \
  "mov.b64 e2, {%" #E2 ", 8};\nmov.b64 e3, {%" #E3 ", 8};\n"                                             \
  "wgmma.fence.sync.aligned;\n"
#define ONE_OF_FOUR_PRODUCTS(N, D, A, E) \
  "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" D "}, {" A "}, " E ", add, 1, 1;\n"
#define FOUR_PRODUCTS_END "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
#define FOUR_RESULTS(q, i) "=f"(d[q][i]), "=f"(d[q][i + 1]), "=f"(d[q][i + 2]), "=f"(d[q][i + 3])
#define FOUR_ROWS(q) "r"(a[q][0]), "r"(a[q][1]), "r"(a[q][2]), "r"(a[q][3])
#define FOUR_BLOCKS(N) "r"(b), "r"(b + 1 * BLOCK_STEP<N>), "r"(b + 2 * BLOCK_STEP<N>), "r"(b + 3 * BLOCK_STEP<N>)

template <>
__device__ __forceinline__ void four_products<8>(float (&d)[4][4], const u32 (&a)[4][4], u32 b) {
  asm volatile(FOUR_PRODUCTS_BEGIN(32, 33, 34, 35)
               ONE_OF_FOUR_PRODUCTS(8, "%0, %1, %2, %3", "%16, %17, %18, %19", "e0")
               ONE_OF_FOUR_PRODUCTS(8, "%4, %5, %6, %7", "%20, %21, %22, %23", "e1")
               ONE_OF_FOUR_PRODUCTS(8, "%8, %9, %10, %11", "%24, %25, %26, %27", "e2")
               ONE_OF_FOUR_PRODUCTS(8, "%12, %13, %14, %15", "%28, %29, %30, %31", "e3")
               FOUR_PRODUCTS_END
               : FOUR_RESULTS(0, 0), FOUR_RESULTS(1, 0), FOUR_RESULTS(2, 0), FOUR_RESULTS(3, 0)
               : FOUR_ROWS(0), FOUR_ROWS(1), FOUR_ROWS(2), FOUR_ROWS(3), FOUR_BLOCKS(8)
               : "memory");
}

template <>
__device__ __forceinline__ void four_products<16>(float (&d)[4][8], const u32 (&a)[4][4], u32 b) {
  asm volatile(FOUR_PRODUCTS_BEGIN(48, 49, 50, 51)
               ONE_OF_FOUR_PRODUCTS(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%32, %33, %34, %35", "e0")
               ONE_OF_FOUR_PRODUCTS(16, "%8, %9, %10, %11, %12, %13, %14, %15", "%36, %37, %38, %39", "e1")
               ONE_OF_FOUR_PRODUCTS(16, "%16, %17, %18, %19, %20, %21, %22, %23", "%40, %41, %42, %43", "e2")
               ONE_OF_FOUR_PRODUCTS(16, "%24, %25, %26, %27, %28, %29, %30, %31", "%44, %45, %46, %47", "e3")
               FOUR_PRODUCTS_END
               : FOUR_RESULTS(0, 0), FOUR_RESULTS(0, 4), FOUR_RESULTS(1, 0), FOUR_RESULTS(1, 4), FOUR_RESULTS(2, 0),
                 FOUR_RESULTS(2, 4), FOUR_RESULTS(3, 0), FOUR_RESULTS(3, 4)
               : FOUR_ROWS(0), FOUR_ROWS(1), FOUR_ROWS(2), FOUR_ROWS(3), FOUR_BLOCKS(16)
               : "memory");
}
#undef FOUR_PRODUCTS_BEGIN
#undef ONE_OF_FOUR_PRODUCTS
#undef FOUR_PRODUCTS_END
#undef FOUR_RESULTS
#undef FOUR_ROWS
#undef FOUR_BLOCKS
#endif
