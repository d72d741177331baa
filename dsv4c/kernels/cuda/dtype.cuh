// Element types of the engine and their conversions, without any header of the CUDA toolkit. Every conversion rounds to
// the nearest value, ties to even, as the reference bodies do (dsv4c/checkpoint/formats.py, dsv4c/graph/ops.py).
//
// DSV4C_EMULATE is set where tests compile the kernels for the CPU; then plain C++ takes the place of PTX.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
struct e4m3 {
  u8 bits;
};
// An exponent: 2^(bits - 127).
struct e8m0 {
  u8 bits;
};
// Two e2m1 codes, the lower nibble first.
struct e2m1x2 {
  u8 bits;
};

#ifdef DSV4C_EMULATE
inline float bits_to_float(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline u32 float_to_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
#else
__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 float_to_bits(float value) { return __float_as_uint(value); }
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(int x) { return (float)x; }
__device__ __forceinline__ float to_float(i8 x) { return (float)x; }
__device__ __forceinline__ float to_float(bf16 x) { return bits_to_float((u32)x.bits << 16); }

__device__ __forceinline__ float to_float(f16 x) {
#ifdef DSV4C_EMULATE
  // Exponent and mantissa moved into a float's, whose bias is 112 larger; the product also normalises subnormals.
  const u32 sign = (u32)(x.bits & 0x8000u) << 16;
  const float magnitude = bits_to_float((u32)(x.bits & 0x7FFFu) << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(magnitude));
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#endif
}

// The NaN codes 0x7F and 0xFF come back as +-480; a build refuses weights that hold them.
__device__ __forceinline__ float to_float(e4m3 x) {
  const u32 sign = (u32)(x.bits & 0x80u) << 24;
  return bits_to_float(sign | (u32)(x.bits & 0x7Fu) << 20) * 0x1p120f;
}

// 2^-127 is subnormal in float32.
__device__ __forceinline__ float to_float(e8m0 x) {
  return x.bits ? bits_to_float((u32)x.bits << 23) : bits_to_float(0x00400000u);
}

// One code of four bits: sign, two bits of exponent (bias 1), one of mantissa.
__device__ __forceinline__ float e2m1_to_float(u32 code) {
  return bits_to_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}
__device__ __forceinline__ float low(e2m1x2 x) { return e2m1_to_float(x.bits & 15u); }
__device__ __forceinline__ float high(e2m1x2 x) { return e2m1_to_float(x.bits >> 4); }

__device__ __forceinline__ bf16 to_bf16(float x) {
#ifdef DSV4C_EMULATE
  const u32 bits = float_to_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {(u16)0x7FFF};
  return {(u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
#else
  // Not cvt.rn.bf16.f32: ptxas 12.6 turns a store of one byte of its result into a conversion to an integer.
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  return {(u16)pair};
#endif
}

// Two floats as bf16 in one register, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#ifdef DSV4C_EMULATE
  return (u32)to_bf16(high).bits << 16 | to_bf16(low).bits;
#else
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// |x| <= 448, or a NaN.
__device__ __forceinline__ e4m3 to_e4m3(float x) {
#ifdef DSV4C_EMULATE
  const u32 bits = float_to_bits(x);
  const u8 sign = (u8)(bits >> 24 & 0x80u);
  const float magnitude = bits_to_float(bits & 0x7FFFFFFFu);
  if (magnitude != magnitude) return {(u8)(sign | 0x7Fu)};
  if (magnitude < 0x1p-6f) return {(u8)(sign | (u8)__builtin_rintf(magnitude * 0x1p9f))};
  const u32 m = bits & 0x7FFFFFFFu;
  const u32 rounded = m + 0x7FFFFu + (m >> 20 & 1u);
  const u32 code = (rounded >> 20) - (120u << 3);
  return {(u8)(sign | (code > 0x7Eu ? 0x7Eu : code))};
#else
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return {(u8)(pair & 0xFFu)};
#endif
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return to_bf16(x); }

// x as it is after a store in T and a load.
template <typename T>
__device__ __forceinline__ float rounded_to(float x) { return to_float(from_float<T>(x)); }

// 2^ceil(log2(x)) for positive x, exactly: up to the next power of two unless x is one (spec 2.9).
__device__ __forceinline__ float ceil_power_of_two(float x) {
  const u32 bits = float_to_bits(x);
  if (bits < 0x00800000u) {  // subnormal: its logarithm is that of x * 2^64
    const u32 scaled = float_to_bits(x * 0x1p64f);
    return bits_to_float((scaled + 0x7FFFFFu) & 0x7F800000u) * 0x1p-64f;
  }
  return bits_to_float((bits + 0x7FFFFFu) & 0x7F800000u);
}

// The scale of a group of largest magnitude amax, for e4m3 (spec 2.9).
__device__ __forceinline__ float fp8_scale(float amax) {
  return ceil_power_of_two((amax > 1e-4f ? amax : 1e-4f) / 448.0f);
}
// For e2m1.
__device__ __forceinline__ float fp4_scale(float amax) {
  const float floor = 6.0f * 0x1p-126f;
  return ceil_power_of_two((amax > floor ? amax : floor) / 6.0f);
}

// The exponent byte of a power of two.
__device__ __forceinline__ e8m0 to_e8m0(float power) { return {(u8)(float_to_bits(power) >> 23)}; }

// The nearest e2m1 value of |x| <= 6, ties to the even code.
__device__ __forceinline__ float round_e2m1(float x) {
  const float magnitude = x < 0 ? -x : x;
  const float step = magnitude < 2.0f ? 0.5f : magnitude < 4.0f ? 1.0f : 2.0f;
#ifdef DSV4C_EMULATE
  return __builtin_copysignf(__builtin_rintf(magnitude / step) * step, x);
#else
  return copysignf(rintf(magnitude / step) * step, x);
#endif
}

// The code of a value that is one of e2m1's.
__device__ __forceinline__ u32 e2m1_code(float value) {
  const u32 bits = float_to_bits(value);
  // float32 of 0.5, 1, 1.5, 2, 3, 4, 6: exponent field 126 to 129 and the top bit of the mantissa.
  const u32 magnitude = bits & 0x7FFFFFFFu;
  const u32 code = magnitude == 0 ? 0u : magnitude == 0x3F000000u ? 1u : (magnitude >> 22) - (126u << 1);
  return (bits >> 31) << 3 | code;
}
