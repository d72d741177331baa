// What the warps of experts_prefill.cu share: shared memory, counters, and how inputs lie.
#pragma once

#ifndef WEIGHTS_STAGES
#define WEIGHTS_STAGES (FP8 ? (TILE > 64 ? 3 : 4) : (TILE > 64 ? 4 : 7))
#endif
#ifndef INPUTS_STAGES
#define INPUTS_STAGES (TILE > 64 ? (FP8 ? 2 : 3) : 4)
#endif

#include "experts_units.cuh"

constexpr int WEIGHTS_WARP = MULTIPLY_WARPS, UNITS_WARP = WEIGHTS_WARP + 1;
constexpr int INPUTS_WARP = UNITS_WARP + 1, PACKING_WARP = INPUTS_WARP + 1;
static_assert(THREADS == 32 * (PACKING_WARP + 1));

// One step of a product is 128 columns: the weights of a strip, and the inputs of a place in f16, as products take
// them: pieces of eight columns, [k / 8][pair][16 bytes], for as many pairs as the place is wide. In global memory those
// of a place lie step by step in the same form (`pack_inputs`, `finish_h`).
constexpr int PIECES = TILE_COLUMNS / 8, PAIR_BYTES = 2 * TILE_COLUMNS;  // of a step
struct __align__(16) WeightsStage {
  u8 panels[PANELS][TILE_BYTES];
};
struct __align__(128) InputsStage {
  u8 pieces[TILE * PAIR_BYTES];
};
// Where a place's inputs begin among those of all, in pairs.
__device__ __forceinline__ i64 begin_of(int place, int first_pair) {
  constexpr int STEP = TILE > 64 ? 16 : 8;  // of widths
  return (first_pair + place * STEP) / STEP * STEP;
}

// The inputs of a place are packed in parts, the columns of two steps; a lane has 16 bytes of every fourth piece.
constexpr int PART_TILES = 2, PACKED_PARTS = (TILES1 + PART_TILES - 1) / PART_TILES;
constexpr int PART_COPIES = PART_TILES * PIECES / 4;

// What the launch before wrote, and what this one hands from block to block.
struct Inputs {
  const u8* rows;  // f16 [T, HIDDEN], as experts_lists.cu orders the columns
  const float* multipliers;
  const float* pair_weights;
  const int* list;
  const Place* places;
};
struct Results {
  u8* packed;  // inputs of the first projection, by place
  u8* h;       // those of the second
  float* parts;
  float* out;
};

struct Unit : UnitBase {
  float multipliers[TILE];  // powers of two that the inputs of the first projection have

  __device__ __forceinline__ void set_input(int i, int kind, int pair, int index, const Inputs& inputs) {
    multipliers[i] = inputs.multipliers[pair / CHOICES];
  }
  // Of the sums of two pairs.
  __device__ __forceinline__ float2 factors(int pair) const {
    const auto inverse = [](float power) { return bits_to_float(0x7F000000u - float_to_bits(power)); };
    return {inverse(multipliers[pair]), inverse(multipliers[pair + 1])};
  }
};

struct Shared {
  InputsStage inputs[INPUTS_STAGES];
  WeightsStage weights[WEIGHTS_STAGES];
  u8 packing[2][PART_COPIES][512];
  Unit units[UNITS];
  // Between the products of the first projection and their rounding.
  u8 rounded[TILE * PAIR_BYTES];  // as a step of inputs
  u16 maxima[ROW_GROUPS][TILE];   // of magnitudes, bf16
  float scales[TILE];
  u64 weights_full[WEIGHTS_STAGES], weights_empty[WEIGHTS_STAGES];  // WEIGHTS_TO_EMPTY bytes apart
  u64 inputs_full[INPUTS_STAGES], inputs_empty[INPUTS_STAGES];
  u64 unit_full[UNITS], unit_empty[UNITS];

  __device__ __forceinline__ u8* weights_of(int slot, int panel) { return weights[slot].panels[panel]; }
};

constexpr int WEIGHTS_TO_EMPTY = 8 * WEIGHTS_STAGES, INPUTS_TO_EMPTY = 8 * INPUTS_STAGES;

// Of the inputs of the second projection; the selector has chosen it so that no input leaves the range of f16.
constexpr float H_TIMES = H_SHIFT < 0 ? 1.0f / (1u << -(H_SHIFT)) : (float)(1u << (H_SHIFT));

// Counters in global memory, all zero before the launch: units of the first projection that are done, of each place;
// parts of its inputs that are packed; units of the second projection that are done, of each strip; the next unit, and
// the next part to pack, of each group of SMs.
struct Counters {
  u32* counters;
  __device__ __forceinline__ u32* place(int place) const { return counters + place; }
  __device__ __forceinline__ u32* packed(int place) const { return counters + MOST_PLACES + place; }
  __device__ __forceinline__ u32* strip(int strip) const { return counters + 2 * MOST_PLACES + strip; }
  __device__ __forceinline__ u32* next_unit(int group) const { return strip(STRIPS2) + 2 * group; }
  __device__ __forceinline__ u32* next_part(int group) const { return next_unit(group) + 1; }
};
