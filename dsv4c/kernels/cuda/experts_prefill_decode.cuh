// Weights in registers: codes become f16 and take their scales with them, so that all products of a row go into one
// sum. Every value is exact.
#pragma once

#include "experts_prefill.cuh"
#include "f16_pairs.cuh"

// What a thread that multiplies knows of itself. The addresses are of its first elements, in stage 0.
struct Multiplier {
  int panel, row_group, lane;
  SharedAddress codes, scales, weights_full, inputs_full;
  u32 inputs;  // of stage 0, as a description of an operand has them

  __device__ __forceinline__ explicit Multiplier(Shared& shared)
      : panel(threadIdx.x / 128), row_group(threadIdx.x / LANES % 4), lane(threadIdx.x % LANES) {
    const u8* const tile = shared.weights[0].panels[panel];
    const u8* const rows = tile + row_group * ROW_GROUP_BYTES;
    codes = fixed_address(rows + lane * 16);
    scales = fixed_address(FP8 ? tile + 4 * ROW_GROUP_BYTES : rows + 1024 + lane / 4 * 8);
    weights_full = fixed_address(shared.weights_full);
    inputs_full = fixed_address(shared.inputs_full);
    inputs = (u32)product_operand(shared.inputs[0].pieces, 0, 0);
  }

  // Of row slots lane / 4 and lane / 4 + 8. FP4: four bytes each, FP8: a float each.
  __device__ __forceinline__ uint2 row_scales(int slot) const {
    return load_shared_8(scales + slot * (int)sizeof(WeightsStage));
  }
  // FP4 of two blocks of 32 columns, FP8 of one; each eight of a row slot and of that eight behind it.
  __device__ __forceinline__ uint4 load_codes(int slot, int part) const {
    return load_shared_16(codes + (slot * (int)sizeof(WeightsStage) + part * 512));
  }
};

#if FP8
// A tile of 128 rows and columns has one scale. It is split into a power of two, which the codes take, and a unit that
// the sums have: scales of the same mantissa share one. Those of the two row slots differ in w13.
struct RowScales {
  static constexpr int SMALLEST = -14, LARGEST = 7;  // powers of two by which all codes are f16 numbers
  static constexpr u32 FARTHEST = 80u << 23;         // below a unit: nothing that a sum would show
  u32 units[2];                                      // bits of floats
  u32 multipliers[2];

  __device__ __forceinline__ RowScales(const Multiplier& own, int slot) {
    const uint2 scales = own.row_scales(slot);
    units[0] = is_zero(scales.x) ? 0x3F800000u : scales.x;
    units[1] = is_zero(scales.y) ? 0x3F800000u : scales.y;
  }
  // Whether the units serve for this tile; the same in all threads of a warpgroup.
  __device__ __forceinline__ bool load(const Multiplier& own, int slot) {
    const uint2 scales = own.row_scales(slot);
    const bool first = split(scales.x, units[0], multipliers[0]), second = split(scales.y, units[1], multipliers[1]);
    return first && second;
  }
  // Where they do not: other units, and what the sums so far are to be multiplied by.
  __device__ __forceinline__ void change(const Multiplier& own, int slot, float (&factors)[2]) {
    const uint2 scales = own.row_scales(slot);
    const u32 next[2] = {scales.x, scales.y};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      factors[half] = 1;
      if (split(next[half], units[half], multipliers[half])) continue;
      factors[half] = __fdividef(bits_to_float(units[half]), bits_to_float(next[half]));
      units[half] = next[half];
      split(next[half], units[half], multipliers[half]);
    }
  }
  __device__ __forceinline__ u32 multiplier(int half, int q) const { return multipliers[half]; }
  __device__ __forceinline__ float factor(int half) const { return bits_to_float(units[half]); }

 private:
  static __device__ __forceinline__ bool is_zero(u32 scale) { return scale < 0x00800000u; }
  static __device__ __forceinline__ bool split(u32 scale, u32 unit, u32& multiplier) {
    const int distance = (int)(scale - unit), power = distance >> 23;
    multiplier = (u32)(power + 15) * 0x04000400u;
    if (is_zero(scale) || scale + FARTHEST < unit) {
      multiplier = 0;
      return true;
    }
    return (distance & 0x7FFFFF) == 0 && SMALLEST <= power && power <= LARGEST;
  }
};
#else
// Scales of 32 columns are powers of two that f16 has (the build refuses others): LEAST to LEAST + 29 in UE8M0.
struct RowScales {
  static constexpr u32 LEAST = 101;
  u32 exponents[2];  // a byte a block, those of f16 shifted left by 2

  __device__ __forceinline__ RowScales(const Multiplier& own, int slot) {}
  __device__ __forceinline__ bool load(const Multiplier& own, int slot) {
    const uint2 scales = own.row_scales(slot);
    exponents[0] = (scales.x - (LEAST - 1) * 0x01010101u) << 2;
    exponents[1] = (scales.y - (LEAST - 1) * 0x01010101u) << 2;
    return true;
  }
  __device__ __forceinline__ void change(const Multiplier& own, int slot, float (&factors)[2]) {}
  __device__ __forceinline__ u32 multiplier(int half, int q) const {
    return __byte_perm(exponents[half], 0, 0x0404 + 0x1010 * q);
  }
  // An exponent of 1 is 2^-14.
  __device__ __forceinline__ float factor(int half) const {
    return FP4_DECODED_TIMES * bits_to_float((u32)(LEAST + 14) << 23);
  }
};
#endif

// 16 rows by `Blocks` times 32 columns, for two products of 16 columns a block: A of hopper.cuh.
template <int Blocks>
struct Operand {
  u32 steps[2 * Blocks][4];

  // Before the product_begin of products that take it: the compiler has to be done with it by then.
  __device__ __forceinline__ void keep() {
#ifndef DSV4C_EMULATE
#pragma unroll
    for (auto& step : steps) asm volatile("" : "+r"(step[0]), "+r"(step[1]), "+r"(step[2]), "+r"(step[3]));
#endif
  }
};

// Codes of a lane: 64 columns of a row slot and of that eight behind it.
struct Codes {
  uint4 of[FP8 ? 2 : 1];

  __device__ __forceinline__ void load(const Multiplier& own, int slot, int half) {
#pragma unroll
    for (int i = 0; i < (FP8 ? 2 : 1); i++) of[i] = own.load_codes(slot, FP8 ? half * 2 + i : half);
  }

  // Block q of the tile, to the first registers of an operand, eight columns a step.
  __device__ __forceinline__ void decode(u32 (*steps)[4], const RowScales& scales, int q) const {
#if FP8
    const uint4& codes = of[q % 2];
    const u32 words[2][2] = {{codes.x, codes.z}, {codes.y, codes.w}};  // [step][row slot]
#else
    u32 words[2][2];
    decode_fp4(q % 2 ? of[0].z : of[0].x, words[0][0], words[1][0]);
    decode_fp4(q % 2 ? of[0].w : of[0].y, words[0][1], words[1][1]);
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 multiplier = scales.multiplier(half, q);
#pragma unroll
      for (int step = 0; step < 2; step++) {
        steps[step][half] = multiply_f16(f16_of_low_e4m3(words[step][half]), multiplier);
        steps[step][half + 2] = multiply_f16(f16_of_high_e4m3(words[step][half]), multiplier);
      }
    }
  }
};
