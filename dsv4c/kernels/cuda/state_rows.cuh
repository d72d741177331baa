// Rows of the state planes: the KV ring, the compressed entries, the index keys (dsv4c/graph/state_ops.py).
//
// A row of `width` channels is, by its format,
//   STATE_F32, STATE_BF16  the channels as they are;
//   STATE_KV               width - rotary e4m3 codes, then the rotary channels as bf16, then zeros; beside it a row of
//                          exponents, one for 64 channels, then zeros;
//   STATE_E2M1, STATE_E4M3 codes (e2m1: two a byte, the lower nibble first), beside them exponents, one for 32 of them.
// A code times its scale is exact in bf16 (but for subnormal ones).
#pragma once

#include "block.cuh"
#include "dtype.cuh"
#include "mma.cuh"
#include "quantize.cuh"

enum StateFormat { STATE_F32, STATE_BF16, STATE_KV, STATE_E2M1, STATE_E4M3 };

constexpr int KV_GROUP = 64;
constexpr int INDEX_GROUP = 32;

// Channel `c` of a row. Rotary counts in STATE_KV only.
template <int Format, int Width, int Rotary>
__device__ __forceinline__ float state_value(const u8* row, const u8* exponents, int c) {
  if (Format == STATE_F32) return ((const float*)row)[c];
  if (Format == STATE_BF16) return to_float(((const bf16*)row)[c]);
  if (Format == STATE_KV) {
    constexpr int PLAIN = Width - Rotary;
    if (c >= PLAIN) {  // an odd number of codes may stand before it
      const u8* bytes = row + PLAIN + 2 * (c - PLAIN);
      return to_float(bf16{(u16)(bytes[0] | bytes[1] << 8)});
    }
    return to_float(e4m3{row[c]}) * to_float(e8m0{exponents[c / KV_GROUP]});
  }
  const float scale = to_float(e8m0{exponents[c / INDEX_GROUP]});
  if (Format == STATE_E4M3) return to_float(e4m3{row[c]}) * scale;
  return e2m1_to_float(row[c / 2] >> (c % 2 * 4) & 15u) * scale;
}

__device__ __forceinline__ float magnitude_of(float x) { return bits_to_float(float_to_bits(x) & 0x7FFFFFFFu); }

// The largest magnitude among the lanes' values; the bits of floats that are not negative have their order.
__device__ __forceinline__ float warp_amax(float x) {
  return bits_to_float(__reduce_max_sync(FULL_MASK, float_to_bits(x) & 0x7FFFFFFFu));
}

// Rounds the first Plain channels of a row in shared memory through e4m3, in groups of 64, each result rounded to T.
// The warps of the block take groups in turn.
template <typename T, int Plain, int Warps>
__device__ __forceinline__ void fp8_round_row(float* row) {
  for (int c = (threadIdx.x / LANES) * KV_GROUP; c < Plain; c += Warps * KV_GROUP) {
    const int one = c + threadIdx.x % LANES, other = one + LANES;
    const float x = one < Plain ? row[one] : 0.0f, y = other < Plain ? row[other] : 0.0f;
    const float scale = fp8_scale(warp_amax(fmaxf(magnitude_of(x), magnitude_of(y))));
    const float inverse = inverse_power(scale);
    if (one < Plain) row[one] = rounded_to<T>(through_e4m3(x, scale, inverse));
    if (other < Plain) row[other] = rounded_to<T>(through_e4m3(y, scale, inverse));
  }
}

// The same through e2m1, in groups of 32.
template <typename T, int Width, int Warps>
__device__ __forceinline__ void fp4_round_row(float* row) {
  for (int c = (threadIdx.x / LANES) * INDEX_GROUP; c < Width; c += Warps * INDEX_GROUP) {
    const int at = c + threadIdx.x % LANES;
    const float x = at < Width ? row[at] : 0.0f;
    const float scale = fp4_scale(warp_amax(x));
    if (at < Width) row[at] = rounded_to<T>(through_e2m1(x, scale, inverse_power(scale)));
  }
}

// Writes a row from shared memory, in the format of its plane; the whole block takes part. The padding behind codes and
// exponents becomes zero, so that saved state is the same bytes for the same tokens.
template <int Format, int Width, int Rotary, int RowBytes, int ExponentBytes, int Warps>
__device__ __forceinline__ void store_state_row(u8* to, u8* exponents, const float* row) {
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  if (Format == STATE_F32) {
    for (int c = thread; c < Width; c += Warps * LANES) ((float*)to)[c] = row[c];
  } else if (Format == STATE_BF16) {
    for (int c = thread; c < Width; c += Warps * LANES) ((bf16*)to)[c] = to_bf16(row[c]);
  } else if (Format == STATE_KV) {
    constexpr int PLAIN = Width - Rotary, GROUPS = (PLAIN + KV_GROUP - 1) / KV_GROUP;
    for (int group = warp; group < GROUPS; group += Warps) {
      const int one = group * KV_GROUP + lane, other = one + LANES;
      const float x = one < PLAIN ? row[one] : 0.0f, y = other < PLAIN ? row[other] : 0.0f;
      const float scale = fp8_scale(warp_amax(fmaxf(magnitude_of(x), magnitude_of(y))));
      const float inverse = inverse_power(scale);
      if (one < PLAIN) to[one] = to_e4m3(fminf(fmaxf(x * inverse, -448.0f), 448.0f)).bits;
      if (other < PLAIN) to[other] = to_e4m3(fminf(fmaxf(y * inverse, -448.0f), 448.0f)).bits;
      if (lane == 0) exponents[group] = to_e8m0(scale).bits;
    }
    // From the last thread down: the first warps have the codes.
    for (int c = Warps * LANES - 1 - thread; c < Rotary; c += Warps * LANES) {
      // In one register of two: NVRTC 12.6 takes a byte of a register with a single bf16 for a conversion to integer.
      const u32 bits = pack_bf16(row[PLAIN + c], 0.0f);
      to[PLAIN + 2 * c] = (u8)bits;
      to[PLAIN + 2 * c + 1] = (u8)(bits >> 8);
    }
    for (int c = PLAIN + 2 * Rotary + thread; c < RowBytes; c += Warps * LANES) to[c] = 0;
    for (int c = GROUPS + thread; c < ExponentBytes; c += Warps * LANES) exponents[c] = 0;
  } else {
    constexpr int GROUPS = (Width + INDEX_GROUP - 1) / INDEX_GROUP;
    for (int group = warp; group < GROUPS; group += Warps) {
      const int at = group * INDEX_GROUP + lane;
      const float x = at < Width ? row[at] : 0.0f;
      const float scale = fp4_scale(warp_amax(x));
      const float value = through_e2m1(x, 1.0f, inverse_power(scale));
      if (Format == STATE_E4M3) {
        if (at < Width) to[at] = to_e4m3(value).bits;
      } else {
        const u32 code = e2m1_code(value);
        const u32 next = __shfl_down_sync(FULL_MASK, code, 1);
        if (at < Width && at % 2 == 0) to[at / 2] = (u8)(code | next << 4);
      }
      if (lane == 0) exponents[group] = to_e8m0(scale).bits;
    }
    constexpr int STORED = Format == STATE_E4M3 ? Width : (Width + 1) / 2;
    for (int c = STORED + thread; c < RowBytes; c += Warps * LANES) to[c] = 0;
    for (int c = GROUPS + thread; c < ExponentBytes; c += Warps * LANES) exponents[c] = 0;
  }
}

// Both halves of a register of two bf16, times those of another.
__device__ __forceinline__ u32 multiply_bf16x2(u32 x, u32 y) {
#ifdef DSV4C_EMULATE
  const u32 low = to_bf16(bits_to_float(x << 16) * bits_to_float(y << 16)).bits;
  return (u32)to_bf16(bits_to_float(x & 0xFFFF0000u) * bits_to_float(y & 0xFFFF0000u)).bits << 16 | low;
#else
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
#endif
}

// The same number in both halves.
__device__ __forceinline__ u32 twice_bf16(u32 bits) { return bits << 16 | bits; }
