// Weights in registers: FP4 codes become e4m3, and their scales wait until the sums of their 32 columns are there.
#pragma once

#include "experts_grouped.cuh"

// A panel's 128 columns are multiplied in parts. Sums of the tensor cores keep some 14 bits: the more products they add
// up, the less is left of each.
constexpr int PART_BLOCKS = FP8 ? 1 : 2;  // of 32 columns
constexpr int PARTS = 4 / PART_BLOCKS;

// What a thread that multiplies knows of itself. The addresses are of its first elements, in stage 0.
struct Multiplier {
  int panel, row_group, lane;
  SharedAddress codes, scales, input_scales, full;
  u32 operand;  // describes the inputs of stage 0, the low word

  __device__ __forceinline__ explicit Multiplier(Shared& shared)
      : panel(threadIdx.x / 128), row_group(threadIdx.x / LANES % 4), lane(threadIdx.x % LANES) {
    const Stage& stage = shared.stages[0];
    const u8* const tile = stage.weights[panel];
    const u8* const rows = tile + row_group * ROW_GROUP_BYTES;
    codes = fixed_address(rows + lane * 16);
    scales = fixed_address(FP8 ? tile + 4 * ROW_GROUP_BYTES : rows + 1024 + lane / 4 * 8);
    input_scales = fixed_address(stage.scales[lane % 4]);
    full = fixed_address(shared.weights_full);
    operand = (u32)product_operand(stage.inputs, PIECE_BYTES, 128);
  }
};

// A stage as such a thread uses it.
struct OwnStage {
  const Multiplier& own;
  int offset;   // bytes from stage 0
  u32 operand;  // of its inputs

  __device__ __forceinline__ OwnStage(const Multiplier& own, int slot)
      : own(own), offset(slot * (int)sizeof(Stage)),
        // The shuffle tells the compiler that it is the same in all lanes.
        operand(__shfl_sync(FULL_MASK, own.operand + slot * (u32)(sizeof(Stage) >> 4), 0)) {}

  // Of 32 columns q, from a pair on.
  __device__ __forceinline__ u64 inputs(int q, int pair) const {
    return (u64)(128 >> 4) << 32 | (operand + (u32)((2 * q * PIECE_BYTES + pair * 16) >> 4));
  }
};

// Of a part, lane by lane: FP4 the codes of two blocks of 32 columns, FP8 of one; each eight of a row slot and of that
// eight behind it.
__device__ __forceinline__ uint4 load_codes(const OwnStage& stage, int part) {
  return load_shared_16(stage.own.codes + (stage.offset + part * 512));
}
// Of row slots lane / 4 and lane / 4 + 8. FP4: four bytes each, FP8: a float each.
__device__ __forceinline__ uint2 load_row_scales(const OwnStage& stage) {
  return load_shared_8(stage.own.scales + stage.offset);
}

// Scales of a lane's two row slots and 128 columns, and the units of its sums.
#if FP8
// A number each; the sums have those of the tile that was loaded last as their units.
struct RowUnits {
  float of[2] = {1, 1};
  __device__ __forceinline__ float factor(int half) const { return of[half]; }
};
struct RowScales {
  // What the sums so far are to be multiplied by, for they get other units; whether it is needed is the same in all
  // lanes.
  bool changed;
  float change[2];

  __device__ __forceinline__ void load(const OwnStage& stage, RowUnits& units) {
    const uint2 scales = load_row_scales(stage);
    const float next[2] = {bits_to_float(scales.x), bits_to_float(scales.y)};
    changed = next[0] != units.of[0] || next[1] != units.of[1];
    if (!changed) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      change[half] = 1;
      if (next[half] == 0) continue;  // of zeros
      change[half] = __fdividef(units.of[half], next[half]);
      units.of[half] = next[half];
    }
  }
  template <int Count>
  __device__ __forceinline__ void apply_change(float (&sums)[Count]) const {
    if (!changed) return;
#pragma unroll
    for (int i = 0; i < Count; i++) sums[i] *= change[i % 4 / 2];
  }
};
#else
// Four bytes each, which the sums of their blocks are multiplied by.
struct RowUnits {
  __device__ __forceinline__ float factor(int half) const { return FP4_DECODED_TIMES; }
};
struct RowScales {
  u32 of[2];

  __device__ __forceinline__ void load(const OwnStage& stage, RowUnits& units) {
    const uint2 scales = load_row_scales(stage);
    of[0] = scales.x, of[1] = scales.y;
  }
  template <int Count>
  __device__ __forceinline__ void apply_change(float (&sums)[Count]) const {}
};
#endif

// A part of a row group: A's registers for each block.
typedef u32 Part[PART_BLOCKS][4];

__device__ __forceinline__ void decode(Part& a, const OwnStage& stage, int part) {
  const uint4 codes = load_codes(stage, part);
#if FP8
  a[0][0] = codes.x, a[0][2] = codes.y, a[0][1] = codes.z, a[0][3] = codes.w;
#else
  decode_fp4(codes.x, a[0][0], a[0][2]), decode_fp4(codes.y, a[0][1], a[0][3]);
  decode_fp4(codes.z, a[1][0], a[1][2]), decode_fp4(codes.w, a[1][1], a[1][3]);
#endif
}
