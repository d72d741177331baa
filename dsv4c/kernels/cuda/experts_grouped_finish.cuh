// What becomes of the products of a unit of the first projection: h in e4m3.
#pragma once

#include "experts_grouped_multiply.cuh"

// In e4m3, to where the columns of inputs lie: of a panel's 32 a row group has the eight that are bytes 4 r to 4 r + 3 of
// both halves.
template <int N>
__device__ __forceinline__ void round_h(Shared& shared, const GatedSums<N>& h, const Multiplier& own) {
  const int g = own.lane / 4;
  u8* const column = shared.rounded[own.panel * 2 + g / 4] + own.row_group * 4 + g % 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const int pair = first_pair(own.lane, j);
    const float2 inverses = *(const float2*)&shared.inverses[pair];
    u8* const to = column + pair * 16;
    const u32 both = pack_e4m3(h.low(j) * inverses.x, h.high(j) * inverses.y);
    to[0] = (u8)both, to[16] = (u8)(both >> 8);
  }
}

// The strip's 128 columns of h in e4m3, under one scale for each pair, to global memory.
template <int N>
__device__ __forceinline__ void finish_h(Shared& shared, const Sums<N>& sums, const Unit& unit, const Multiplier& own,
                                         const Results& results) {
  const GatedSums<N> gated(sums, unit, own.lane);
  gated.find_maxima(shared.maxima[own.panel * 4 + own.row_group], own.lane);
  meet();
  const int thread = threadIdx.x;
  if (thread < N) {
    const float scale = scale_of(shared.maxima, thread);
    shared.inverses[thread] = inverse_power(scale);
    if (thread < unit.count) results.h_scales[(i64)(unit.first + thread) * TILES2 + unit.strip] = scale;
  }
  meet();
  round_h(shared, gated, own);
  meet();
  for (int i = thread; i < unit.count * 8; i += MULTIPLY_THREADS) {
    const int pair = i / 8, piece = i % 8;
    u8* const to = results.h + (i64)(unit.first + pair) * INNER + unit.strip * TILE_COLUMNS + piece * 16;
    *(uint4*)to = *(const uint4*)(shared.rounded[piece] + pair * 16);
  }
}
