// What the warps of experts_grouped.cu share: the shape of the work, and shared memory.
#pragma once

#include "block.cuh"
#include "experts_packed.cuh"
#include "hopper_product.cuh"

static_assert(TILE % 16 == 0 && TILE <= 128 && HIDDEN % 128 == 0 && INNER % 128 == 0);

// A unit of work is a strip, four panels of a matrix, times the pairs of a place. A strip of w13 makes 128 columns of
// h, which share a scale; the last strip of w2 may have two panels.
constexpr int PANELS = 4;
constexpr int STRIPS1 = PANELS1 / PANELS, STRIPS2 = (PANELS2 + PANELS - 1) / PANELS;
constexpr int STRIP_COLUMNS = PANELS * PANEL_ROWS;  // of the result

// The warps: warpgroups that multiply, a panel each, or two where the sums of more pairs take more registers; the
// others bring what these need.
constexpr int WARPGROUPS = TILE > 64 ? 2 : 4, OWN_PANELS = PANELS / WARPGROUPS;
constexpr int MULTIPLY_WARPS = 4 * WARPGROUPS, MULTIPLY_THREADS = 32 * MULTIPLY_WARPS;
constexpr int WEIGHTS_WARP = MULTIPLY_WARPS, UNITS_WARP = WEIGHTS_WARP + 1;
constexpr int FIRST_INPUTS_WARP = UNITS_WARP + 1, INPUTS_WARPS = 2, INPUTS_THREADS = 32 * INPUTS_WARPS;
constexpr int THREADS = 32 * (FIRST_INPUTS_WARP + INPUTS_WARPS);
// Of the registers that a block starts with those that multiply take over what the others can spare.
constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int MULTIPLY_REGISTERS = WARPGROUPS == 2 ? 232 : 112, OTHER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
static_assert(MULTIPLY_THREADS * MULTIPLY_REGISTERS + (THREADS - MULTIPLY_THREADS) * OTHER_REGISTERS ==
              THREADS * START_REGISTERS);
constexpr int ROW_GROUPS = 4 * PANELS;  // of a strip

// Pairs that a place is computed for: its own, rounded up to what products are compiled for.
#if TILE > 64
#define FOR_EACH_WIDTH(F) F(16) F(32) F(48) F(64) F(80) F(96) F(112) F(128)
__device__ __forceinline__ int width_of(int pairs) { return (pairs + 15) / 16 * 16; }
#else
#define FOR_EACH_WIDTH(F) F(8) F(16) F(24) F(32) F(48) F(64)
__device__ __forceinline__ int width_of(int pairs) {
  return pairs <= 32 ? (pairs + 7) / 8 * 8 : (pairs + 15) / 16 * 16;
}
#endif

constexpr int PIECE_BYTES = 16 * TILE;  // 16 columns of the inputs of all pairs

// One step of a product: 128 columns of a strip, and of the inputs of all pairs.
struct __align__(128) Stage {
  u8 inputs[8][PIECE_BYTES];         // [k / 16][pair][16 bytes]: core matrices as products take them
  u8 weights[PANELS][TILE_BYTES];
  float scales[4][TILE / 4 + 4];    // of the inputs: [pair % 8 / 2][pair / 8 * 2 + pair % 2], as a lane takes them
};

enum UnitKind { FIRST, SECOND, END };

struct __align__(16) Unit {
  int kind;  // of which projection; END: there are no more
  int strip;
  int place, expert, first, count;  // the place, its part of the list
  int width;                        // width_of(count)
  int sums_end;  // strips of the result before this one are to be added up first
  int pairs[TILE];
  float weights[TILE];  // of the pairs
  u32 rows[TILE];       // bytes to the inputs of each pair; those that are missing repeat the last
};
constexpr int UNITS = 2;  // the one that is multiplied, and the next

#ifndef STAGES
#define STAGES (FP8 ? 4 : TILE > 64 ? 5 : 6)
#endif

struct Shared {
  Stage stages[STAGES];
  Unit units[UNITS];
  // Between the products of the first projection and their rounding.
  u8 rounded[8][PIECE_BYTES + 16];  // as Stage::inputs
  u16 maxima[ROW_GROUPS][TILE];  // of magnitudes, bf16
  float inverses[TILE];
  u64 full[STAGES], empty[STAGES];  // FULL_TO_EMPTY bytes apart
  u64 unit_full[UNITS], unit_empty[UNITS];
};

constexpr int FULL_TO_EMPTY = 8 * STAGES;

// Counters in global memory, all zero before the launch: units of the first projection that are done, of each place;
// the next unit of each group of SMs; units of the second projection that are done, of each strip.
constexpr int PAIRS = ROWS * CHOICES, PAIRS_HIT = PAIRS < EXPERTS ? PAIRS : EXPERTS;
constexpr int MOST_PLACES = PAIRS_HIT + (PAIRS - PAIRS_HIT) / TILE;
struct Counters {
  u32* counters;
  __device__ __forceinline__ u32* place(int place) const { return counters + place; }
  __device__ __forceinline__ u32* next_unit(int group) const { return counters + MOST_PLACES + group; }
  __device__ __forceinline__ u32* strip(int strip) const { return counters + MOST_PLACES + GROUPS + strip; }
};

__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
  while (load_acquire(counter) < count) pause(50);
}

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
