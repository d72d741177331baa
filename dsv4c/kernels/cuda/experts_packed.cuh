// The packed experts of a layer (dsv4c/checkpoint/expert_packing.py) and the lists of who takes them (experts_lists.cu).
//
// An expert's record is the panels of w13, then those of w2. A panel has 64 rows and all columns, as tiles of 128
// columns one after the other; a tile has four row groups of 16 row slots. A panel of w13 holds 32 rows of the gate and
// the same 32 of up: slot s < 8 of row group r is gate row 8r + s, slot s + 8 is up row 8r + s. Of w2, slots s and s + 8
// are rows 16r + 2s and 16r + 2s + 1, so that a lane has neighbours. Macros: FP8, HIDDEN, INNER.
#pragma once

#include "dtype.cuh"

// Pairs of a row and one of its choices that go through an expert together: `count` places of the list from `first` on.
struct Place {
  int expert;
  int first;
  int count;
  int reserved;
};

constexpr int PANEL_ROWS = 64, TILE_COLUMNS = 128;
// FP4: 1,024 bytes of codes and 64 of scales. FP8: 2,048 bytes of codes; the tile's two scales come behind its groups.
constexpr int ROW_GROUP_BYTES = FP8 ? 2048 : 1088;
constexpr int TILE_BYTES = 4 * ROW_GROUP_BYTES + (FP8 ? 16 : 0);

constexpr int TILES1 = HIDDEN / TILE_COLUMNS, TILES2 = INNER / TILE_COLUMNS;       // of a panel
constexpr int PANELS1 = 2 * INNER / PANEL_ROWS, PANELS2 = HIDDEN / PANEL_ROWS;     // of an expert
constexpr int PANEL1_BYTES = TILES1 * TILE_BYTES, PANEL2_BYTES = TILES2 * TILE_BYTES;
constexpr int SECOND_BYTES = PANELS1 * PANEL1_BYTES;  // where w2 begins

// Eight FP4 codes as two registers of four e4m3, times 2^-6: E2M1 is E4M3 with fewer bits, and the packing has put them
// where two masks and two shifts find them. low: columns 0 to 3 of the eight, high: 4 to 7.
__device__ __forceinline__ void decode_fp4(u32 codes, u32& low, u32& high) {
  low = codes & 0x9C9C9C9Cu;
  high = (codes << 2 & 0x88888888u) | ((codes << 4 | codes >> 28) & 0x14141414u);
}
constexpr float FP4_DECODED_TIMES = 64.0f;

// 2^(byte - 127) of byte `index` of a word of scales; `index` is a constant where it is called.
__device__ __forceinline__ float fp4_scale_of(u32 scales, int index) {
  return bits_to_float((index == 3 ? scales >> 1 : scales << (23 - 8 * index)) & 0x7F800000u);
}

// A product of both projections, before its rounding.
__device__ __forceinline__ float gated(float gate, float up) {
  gate = fminf(gate, (float)LIMIT);
  up = fminf(fmaxf(up, -(float)LIMIT), (float)LIMIT);
  return gate / (1.0f + __expf(-gate)) * up;
}
