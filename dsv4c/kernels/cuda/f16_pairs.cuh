// Two f16 in a register, the lower one in the low half.
#pragma once

#include "dtype.cuh"

#ifdef DSV4C_EMULATE
// Rounded to the nearest, ties to even; beyond 65504 an infinity.
inline f16 emulated_f16(float x) {
  const u32 sign = float_to_bits(x) >> 16 & 0x8000u;
  const float magnitude = bits_to_float(float_to_bits(x) & 0x7FFFFFFFu);
  if (magnitude != magnitude) return {(u16)0x7FFF};
  if (magnitude < 0x1p-14f) return {(u16)(sign | (u32)__builtin_rintf(magnitude * 0x1p24f))};
  const u32 bits = float_to_bits(magnitude);
  const u32 rounded = (bits + 0xFFFu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
  return {(u16)(sign | (magnitude >= 65520.0f ? 0x7C00u : rounded))};
}
#endif

__device__ __forceinline__ u32 f16_pair(float low, float high) {
#ifdef DSV4C_EMULATE
  return (u32)emulated_f16(high).bits << 16 | emulated_f16(low).bits;
#else
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ u32 twice_f16(float x) { return f16_pair(x, x); }

// Of the two e4m3 codes in the low or the high half of a word.
__device__ __forceinline__ u32 f16_of_low_e4m3(u32 codes) {
#ifdef DSV4C_EMULATE
  return f16_pair(to_float(e4m3{(u8)codes}), to_float(e4m3{(u8)(codes >> 8)}));
#else
  u32 pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(pair) : "r"(codes));
  return pair;
#endif
}
__device__ __forceinline__ u32 f16_of_high_e4m3(u32 codes) {
#ifdef DSV4C_EMULATE
  return f16_of_low_e4m3(codes >> 16);
#else
  u32 pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(pair) : "r"(codes));
  return pair;
#endif
}

__device__ __forceinline__ u32 multiply_f16(u32 x, u32 y) {
#ifdef DSV4C_EMULATE
  const auto half = [](u32 pair, int shift) { return to_float(f16{(u16)(pair >> shift)}); };
  return f16_pair(half(x, 0) * half(y, 0), half(x, 16) * half(y, 16));
#else
  u32 product;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
#endif
}
