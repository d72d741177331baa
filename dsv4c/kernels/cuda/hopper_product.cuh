// Products of a warpgroup (hopper.cuh) of N columns, one at a time. Whoever chains them puts product_begin before,
// product_commit and product_wait behind, and keeps the compiler from touching the sums in between (keep_sums).
#pragma once

#include "hopper.cuh"

// d [64, N] (+)= a [64, 32] b [32, N] of e4m3; N is a multiple of 8 up to 128.
template <int N>
__device__ __forceinline__ void product(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate);
// d [64, N] += a [64, 16] b [16, N] of f16.
template <int N>
__device__ __forceinline__ void add_f16_product(float (&d)[N / 2], const u32 (&a)[4], u64 b);

// Behind product_wait: reads of the sums stay behind it.
template <int Count>
__device__ __forceinline__ void keep_sums(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; i++) keep(d[i]);
}

#ifdef DSV4C_EMULATE
template <int N>
void product(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
  emulated_warpgroup_product(d, N, a, b, accumulate);
}
template <int N>
void add_f16_product(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
  emulated_f16_product(d, N, a, b);
}
template <int Registers>
void take_registers() {}
template <int Registers>
void give_registers() {}
#else
// A warpgroup's registers a thread from now on: more, as soon as others have given them back, or fewer.
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// The sums of N columns as operands, PRODUCT_SUMS_N by number and PRODUCT_BOUND_N with their constraint X.
#define PRODUCT_SUMS_8 "%0, %1, %2, %3"
#define PRODUCT_SUMS_16 PRODUCT_SUMS_8 ", %4, %5, %6, %7"
#define PRODUCT_SUMS_24 PRODUCT_SUMS_16 ", %8, %9, %10, %11"
#define PRODUCT_SUMS_32 PRODUCT_SUMS_24 ", %12, %13, %14, %15"
#define PRODUCT_SUMS_40 PRODUCT_SUMS_32 ", %16, %17, %18, %19"
#define PRODUCT_SUMS_48 PRODUCT_SUMS_40 ", %20, %21, %22, %23"
#define PRODUCT_SUMS_56 PRODUCT_SUMS_48 ", %24, %25, %26, %27"
#define PRODUCT_SUMS_64 PRODUCT_SUMS_56 ", %28, %29, %30, %31"
#define PRODUCT_SUMS_72 PRODUCT_SUMS_64 ", %32, %33, %34, %35"
#define PRODUCT_SUMS_80 PRODUCT_SUMS_72 ", %36, %37, %38, %39"
#define PRODUCT_SUMS_88 PRODUCT_SUMS_80 ", %40, %41, %42, %43"
#define PRODUCT_SUMS_96 PRODUCT_SUMS_88 ", %44, %45, %46, %47"
#define PRODUCT_SUMS_104 PRODUCT_SUMS_96 ", %48, %49, %50, %51"
#define PRODUCT_SUMS_112 PRODUCT_SUMS_104 ", %52, %53, %54, %55"
#define PRODUCT_SUMS_120 PRODUCT_SUMS_112 ", %56, %57, %58, %59"
#define PRODUCT_SUMS_128 PRODUCT_SUMS_120 ", %60, %61, %62, %63"
#define PRODUCT_BOUND_8(X) X(d[0]), X(d[1]), X(d[2]), X(d[3])
#define PRODUCT_BOUND_16(X) PRODUCT_BOUND_8(X), X(d[4]), X(d[5]), X(d[6]), X(d[7])
#define PRODUCT_BOUND_24(X) PRODUCT_BOUND_16(X), X(d[8]), X(d[9]), X(d[10]), X(d[11])
#define PRODUCT_BOUND_32(X) PRODUCT_BOUND_24(X), X(d[12]), X(d[13]), X(d[14]), X(d[15])
#define PRODUCT_BOUND_40(X) PRODUCT_BOUND_32(X), X(d[16]), X(d[17]), X(d[18]), X(d[19])
#define PRODUCT_BOUND_48(X) PRODUCT_BOUND_40(X), X(d[20]), X(d[21]), X(d[22]), X(d[23])
#define PRODUCT_BOUND_56(X) PRODUCT_BOUND_48(X), X(d[24]), X(d[25]), X(d[26]), X(d[27])
#define PRODUCT_BOUND_64(X) PRODUCT_BOUND_56(X), X(d[28]), X(d[29]), X(d[30]), X(d[31])
#define PRODUCT_BOUND_72(X) PRODUCT_BOUND_64(X), X(d[32]), X(d[33]), X(d[34]), X(d[35])
#define PRODUCT_BOUND_80(X) PRODUCT_BOUND_72(X), X(d[36]), X(d[37]), X(d[38]), X(d[39])
#define PRODUCT_BOUND_88(X) PRODUCT_BOUND_80(X), X(d[40]), X(d[41]), X(d[42]), X(d[43])
#define PRODUCT_BOUND_96(X) PRODUCT_BOUND_88(X), X(d[44]), X(d[45]), X(d[46]), X(d[47])
#define PRODUCT_BOUND_104(X) PRODUCT_BOUND_96(X), X(d[48]), X(d[49]), X(d[50]), X(d[51])
#define PRODUCT_BOUND_112(X) PRODUCT_BOUND_104(X), X(d[52]), X(d[53]), X(d[54]), X(d[55])
#define PRODUCT_BOUND_120(X) PRODUCT_BOUND_112(X), X(d[56]), X(d[57]), X(d[58]), X(d[59])
#define PRODUCT_BOUND_128(X) PRODUCT_BOUND_120(X), X(d[60]), X(d[61]), X(d[62]), X(d[63])

// Not accumulating, the sums are results only, so that nothing has to be put into them before. Of f16 B has yet
// another operand that says how it lies in memory: along k.
#define PRODUCT_STATEMENT(N, TYPE, ADD, X, A0, A1, A2, A3, B, LAST)                                        \
  asm volatile(                                                                                            \
      "{\n.reg .pred add;\nsetp.ne.u32 add, " ADD ", 0;\n"                                                 \
      "wgmma.mma_async.sync.aligned.m64n" #N TYPE " {" PRODUCT_SUMS_##N "}, "                               \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1" LAST ";\n}"                           \
      : PRODUCT_BOUND_##N(X)                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                 \
      : "memory")
#define E4M3_TYPE "k32.f32.e4m3.e4m3"
// A0 to B: the numbers of the operands behind the sums, N / 2 and the next ones.
#define DEFINE_PRODUCT(N, A0, A1, A2, A3, B)                                                               \
  template <>                                                                                              \
  __device__ __forceinline__ void product<N>(float(&d)[N / 2], const u32(&a)[4], u64 b, bool accumulate) { \
    if (accumulate)                                                                                        \
      PRODUCT_STATEMENT(N, E4M3_TYPE, "1", "+f", A0, A1, A2, A3, B, "");                                   \
    else                                                                                                   \
      PRODUCT_STATEMENT(N, E4M3_TYPE, "0", "=f", A0, A1, A2, A3, B, "");                                   \
  }                                                                                                        \
  template <>                                                                                              \
  __device__ __forceinline__ void add_f16_product<N>(float(&d)[N / 2], const u32(&a)[4], u64 b) {          \
    PRODUCT_STATEMENT(N, "k16.f32.f16.f16", "1", "+f", A0, A1, A2, A3, B, ", 0");                          \
  }
DEFINE_PRODUCT(8, 4, 5, 6, 7, 8)
DEFINE_PRODUCT(16, 8, 9, 10, 11, 12)
DEFINE_PRODUCT(24, 12, 13, 14, 15, 16)
DEFINE_PRODUCT(32, 16, 17, 18, 19, 20)
DEFINE_PRODUCT(40, 20, 21, 22, 23, 24)
DEFINE_PRODUCT(48, 24, 25, 26, 27, 28)
DEFINE_PRODUCT(56, 28, 29, 30, 31, 32)
DEFINE_PRODUCT(64, 32, 33, 34, 35, 36)
DEFINE_PRODUCT(72, 36, 37, 38, 39, 40)
DEFINE_PRODUCT(80, 40, 41, 42, 43, 44)
DEFINE_PRODUCT(88, 44, 45, 46, 47, 48)
DEFINE_PRODUCT(96, 48, 49, 50, 51, 52)
DEFINE_PRODUCT(104, 52, 53, 54, 55, 56)
DEFINE_PRODUCT(112, 56, 57, 58, 59, 60)
DEFINE_PRODUCT(120, 60, 61, 62, 63, 64)
DEFINE_PRODUCT(128, 64, 65, 66, 67, 68)
#undef DEFINE_PRODUCT
#undef E4M3_TYPE
#undef PRODUCT_STATEMENT
#endif
