// The shared memory of a block of experts_stream.cu, and how its warps take turns in it.
#pragma once

#include "experts_stretch.cuh"
#include "hopper.cuh"

#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

constexpr int COMPUTE_WARPS = 4 * WARPGROUPS, FINISH_WARPS = 3;
constexpr int COPY_WARP = COMPUTE_WARPS, FIRST_FINISH_WARP = COPY_WARP + 1;
constexpr int THREADS = 32 * (COMPUTE_WARPS + 1 + FINISH_WARPS);

constexpr int SLOT_BYTES = WARPGROUPS * TILE_BYTES;
constexpr int MOST_SLOTS = SLOTS1 > SLOTS2 ? SLOTS1 : SLOTS2;
// The inputs of one tile, for all pairs of a place: [k32][half][pair][16 bytes], core matrices as products take them.
constexpr int INPUT_BYTES = TILE_COLUMNS * TILE, HALF_BYTES = 16 * TILE;
static_assert(TILE == 8 || TILE == 16, "the columns of a product");
constexpr int EIGHTS = TILE / 8;  // of the pairs of a place
constexpr int PAIRS = ROWS * CHOICES, PAIRS_HIT = PAIRS < EXPERTS ? PAIRS : EXPERTS;
constexpr int MOST_PLACES = PAIRS_HIT + (PAIRS - PAIRS_HIT) / TILE;
constexpr int ROW_GROUPS = 4;  // of a panel
constexpr int BUFFERS = FINISH_WARPS;  // of sums between computing and finishing: each finishing warp has its own

// Of the list: short where the inputs take twice the room.
#if TILE == 8
typedef int PairNumber;
#else
typedef u16 PairNumber;
static_assert(PAIRS <= 65536, "the numbers of pairs");
#endif

struct Shared {
  u8 ring[SLOTS][SLOT_BYTES];
  u8 inputs[WARPGROUPS][MOST_SLOTS * INPUT_BYTES];
  float input_scales[WARPGROUPS][MOST_SLOTS * TILE];
  float4 sums[BUFFERS][COMPUTE_WARPS][EIGHTS][32];
  Place places[MOST_PLACES];
  PairNumber pairs[PAIRS];
  Stretch own;
  u64 full[SLOTS], empty[SLOTS];
  u64 computed[BUFFERS], finished[BUFFERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

// Sums of a row group: element i is of pair i / 4 * 8 + 2 (lane % 4) + i % 2 and row slot lane / 4 + i / 2 % 2 * 8.
typedef float Sums[TILE / 2];
