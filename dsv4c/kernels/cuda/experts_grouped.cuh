// What the warps of experts_grouped.cu share: shared memory, counters, and where inputs are.
#pragma once

#ifndef WEIGHTS_STAGES
#define WEIGHTS_STAGES (FP8 ? 4 : 6)
#endif

#include "experts_units.cuh"

static_assert(TILE <= 32);

constexpr int WEIGHTS_WARP = MULTIPLY_WARPS, UNITS_WARP = WEIGHTS_WARP + 1;
constexpr int FIRST_INPUTS_WARP = UNITS_WARP + 1, INPUTS_WARPS = 2, INPUTS_THREADS = 32 * INPUTS_WARPS;
static_assert(THREADS == 32 * (FIRST_INPUTS_WARP + INPUTS_WARPS));

constexpr float H_TIMES = 1;           // as it is
constexpr int PIECE_BYTES = 16 * TILE;  // 16 columns of the inputs of all pairs

// One step of a product: 128 columns of a strip, and of the inputs of all pairs.
struct __align__(128) Stage {
  u8 inputs[8][PIECE_BYTES];         // [k / 16][pair][16 bytes]: core matrices as products take them
  u8 weights[PANELS][TILE_BYTES];
  float scales[4][TILE / 4 + 4];    // of the inputs: [pair % 8 / 2][pair / 8 * 2 + pair % 2], as a lane takes them
};

// What the launch before wrote, and what this one hands from block to block.
struct Inputs {
  const u8* xq;
  const float* xs;
  const float* pair_weights;
  const int* list;
  const Place* places;
};
struct Results {
  u8* h;
  float* h_scales;
  float* parts;
  float* out;
};

struct Unit : UnitBase {
  u32 rows[TILE];  // bytes to the inputs of each pair

  __device__ __forceinline__ void set_input(int i, int kind, int pair, int index, const Inputs& inputs) {
    rows[i] = kind == FIRST ? (u32)(pair / CHOICES) * HIDDEN : (u32)index * INNER;
  }
  // Of the sums of two pairs.
  __device__ __forceinline__ float2 factors(int pair) const { return {1, 1}; }
};

struct Shared {
  Stage stages[WEIGHTS_STAGES];
  Unit units[UNITS];
  // Between the products of the first projection and their rounding.
  u8 rounded[8][PIECE_BYTES + 16];  // as Stage::inputs
  u16 maxima[ROW_GROUPS][TILE];     // of magnitudes, bf16
  float inverses[TILE];
  u64 weights_full[WEIGHTS_STAGES], weights_empty[WEIGHTS_STAGES];  // FULL_TO_EMPTY bytes apart
  u64 unit_full[UNITS], unit_empty[UNITS];

  __device__ __forceinline__ u8* weights_of(int slot, int panel) { return stages[slot].weights[panel]; }
};

constexpr int FULL_TO_EMPTY = 8 * WEIGHTS_STAGES;

// Counters in global memory, all zero before the launch: units of the first projection that are done, of each place;
// the next unit of each group of SMs; units of the second projection that are done, of each strip.
struct Counters {
  u32* counters;
  __device__ __forceinline__ u32* place(int place) const { return counters + place; }
  __device__ __forceinline__ u32* next_unit(int group) const { return counters + MOST_PLACES + group; }
  __device__ __forceinline__ u32* strip(int strip) const { return counters + MOST_PLACES + GROUPS + strip; }
};
