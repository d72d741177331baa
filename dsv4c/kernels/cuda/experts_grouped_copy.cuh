// The warps that gather the inputs of the pairs into the ring of stages.
#pragma once

#include "async.cuh"
#include "experts_grouped.cuh"

// Until the h of a place is complete.
__device__ __forceinline__ void wait_for_h(const u32* counter) {
  if (threadIdx.x % LANES == 0) wait_for_count(counter, STRIPS1);
  __syncwarp();
}

// Each of the two warps copies half of the 128 columns, 16 bytes a lane: of eight pairs those that lie beside each
// other in shared memory. A thread has the scales of a pair, or of some. The copies arrive at the stage when they are
// done, so that these warps never wait for memory.
__device__ __forceinline__ void copy_inputs(Shared& shared, const Inputs& inputs, const Results& results,
                                            const Counters& counters) {
  constexpr int OWN_PIECES = TILE / 8, OWN_SCALES = (TILE + INPUTS_THREADS - 1) / INPUTS_THREADS;
  const int thread = threadIdx.x - FIRST_INPUTS_WARP * LANES, lane = thread % LANES;
  const int piece = thread / LANES * 4 + lane / 8;
  Ring<UNITS> units;
  Ring<WEIGHTS_STAGES> ring;
  while (true) {
    barrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit& unit = shared.units[units.slot];
    if (unit.kind == END) return;
    const bool second = unit.kind == SECOND;
    if (second) wait_for_h(counters.place(unit.place));
    const int tiles = second ? TILES2 : TILES1, width = unit.width;
    const u8* from = (second ? results.h : inputs.xq) + piece * 16;
    const float* scales = second ? results.h_scales : inputs.xs;
    u32 rows[OWN_PIECES], scale_rows[OWN_SCALES];
#pragma unroll
    for (int i = 0; i < OWN_PIECES; i++) rows[i] = i * 8 < width ? unit.rows[i * 8 + lane % 8] : 0;
#pragma unroll
    for (int i = 0; i < OWN_SCALES; i++) {
      const int pair = thread + i * INPUTS_THREADS;
      scale_rows[i] = pair < width ? unit.rows[pair] / TILE_COLUMNS : 0;
    }
    for (int tile = 0; tile < tiles; tile++, from += TILE_COLUMNS, scales++, ring.advance()) {
      barrier_wait(&shared.weights_empty[ring.slot], ring.parity ^ 1);
      Stage& stage = shared.stages[ring.slot];
      u8* const to = stage.inputs[piece] + lane % 8 * 16;
#pragma unroll
      for (int i = 0; i < OWN_PIECES; i++)
        if (i * 8 < width) cp_async_16(to + i * 128, from + rows[i]);
      // Through L1, which forgets what it had when the warp has seen that h is complete.
#pragma unroll
      for (int i = 0; i < OWN_SCALES; i++) {
        const int pair = thread + i * INPUTS_THREADS;
        if (pair < width) cp_async_4(&stage.scales[pair % 8 / 2][pair / 8 * 2 + pair % 2], scales + scale_rows[i]);
      }
      cp_async_arrive(&shared.weights_full[ring.slot]);
    }
    units.advance();
  }
}
