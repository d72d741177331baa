// What the warps that multiply do with a unit (experts_units.cuh). The including kernel has what differs: Shared, Unit,
// Results, Multiplier, Rings, multiply, skip, finish_h, and H_TIMES, by which h is multiplied.
#pragma once

#include "experts_units_finish.cuh"

struct ComputeUnit {
  Shared& shared;
  const Results& results;
  const Multiplier own;
  Rings rings;

  template <int N>
  __device__ __forceinline__ void operator()(const Unit& unit, Width<N>) {
    const bool first = unit.kind == FIRST;
    const int tiles = first ? TILES1 : TILES2;
    const bool idle = PANELS2 % PANELS && !first && unit.strip * PANELS + own.panel >= PANELS2;
    Sums<N> sums = {};
    if (STREAM_ONLY || idle)
      skip(own, rings, tiles);
    else
      multiply<N>(sums, own, rings, tiles);
    if (first)
      finish_h<N>(shared, sums, unit, own, results);
    else if (!idle)
      finish_parts<N>(sums, unit, own.panel * PANEL_ROWS + own.row_group * 16 + own.lane / 4 * 2, own.lane,
                      1 / H_TIMES, results.parts);
  }
};
