// Four products of a warpgroup with eight columns each (hopper.cuh), for the 128 columns that share a scale of the
// inputs. One statement from the fence to the wait: the compiler can put nothing between that would make it wait after
// every one.
#pragma once

#include "hopper.cuh"

// From one block of B (32 x 8, two core matrices of 128 bytes) to the next.
constexpr u32 BLOCK_STEP = 32 * 8 >> 4;

// d[q] = a[q] b[q]. b: the low word of `product_operand` of the first block of B, warp-uniform for the compiler's sake.
#ifdef DSV4C_EMULATE
inline void four_products(float (&d)[4][4], const u32 (&a)[4][4], u32 b) {
  product_begin();
  for (int q = 0; q < 4; q++)
    emulated_warpgroup_product(d[q], 8, a[q], (u64)(128 >> 4) << 32 | (b + q * BLOCK_STEP), false);
  product_commit();
  product_wait<0>();
}
#else
__device__ __forceinline__ void four_products(float (&d)[4][4], const u32 (&a)[4][4], u32 b) {
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
        "r"(a[3][2]), "r"(a[3][3]), "r"(b), "r"(b + 1 * BLOCK_STEP), "r"(b + 2 * BLOCK_STEP), "r"(b + 3 * BLOCK_STEP)
      : "memory");
}
#endif
