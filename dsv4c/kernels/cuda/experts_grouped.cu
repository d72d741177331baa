// The routed experts of a step of many rows, in one launch of a block on every SM. Blocks draw units of work
// (experts_grouped_units.cuh): a strip of 256 rows of w13 or w2 times the pairs of a place. Weights are read from
// memory once, decoded into registers and multiplied by the tensor cores as e4m3 (experts_grouped_multiply.cuh); h goes
// through global memory to whoever draws the second projection of its place, and the parts of a row are added up in the
// order of its choices, a strip of columns at a time (experts_grouped_finish.cuh).
//
// The warps of a block: 16 or 8 (TILE > 64) that multiply, one that copies weights into the ring of stages, one that
// draws units, and two that gather the inputs of the pairs into the ring.
//
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, SMS, GROUPS
// (of SMs that share places), TILE (pairs of a place: 16 to 128), ROWS (the bucket's), OUT_STRIDE, SHARED_BYTES; STAGES
// if the ring is to have others than experts_grouped.cuh says; for measuring, STREAM_ONLY 1 leaves the products out.
#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

#include "experts_grouped_copy.cuh"
#include "experts_grouped_finish.cuh"
#include "experts_grouped_units.cuh"
#include "step.cuh"

static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

template <int N>
__device__ __forceinline__ void compute_unit(Shared& shared, const Unit& unit, const Multiplier& own,
                                             Ring<STAGES>& ring, const Results& results) {
  const bool first = unit.kind == FIRST;
  const int tiles = first ? TILES1 : TILES2;
  const bool idle = PANELS2 % PANELS && !first && unit.strip * PANELS + own.first_panel >= PANELS2;
  Sums<N> sums = {};
  if (STREAM_ONLY || idle)
    skip(own, ring, tiles);
  else if (PARTS_TOGETHER<N> && !first)
    multiply<N, PARTS_TOGETHER<N>>(sums, own, ring, tiles);
  else
    multiply<N, false>(sums, own, ring, tiles);
  if (first)
    finish_h<N>(shared, sums, unit, own, results);
  else if (!idle)
    finish_parts<N>(sums, unit, own, results);
}

// The units that the block draws, and between them its share of the sums.
__device__ __forceinline__ void compute(Shared& shared, int places, int rows, const Results& results,
                                        const Counters& counters) {
  const Multiplier own(shared);
  Ring<UNITS> units;
  Ring<STAGES> ring;
  int summed = 0;
  while (true) {
    barrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit& unit = shared.units[units.slot];
    for (; summed < unit.sums_end; summed++) sum_strip(summed, places, rows, results, counters);
    if (unit.kind == END) return;
#define COMPUTE_IF(N) \
  if (N <= TILE && unit.width == N) compute_unit<N <= TILE ? N : TILE>(shared, unit, own, ring, results);
    FOR_EACH_WIDTH(COMPUTE_IF)
#undef COMPUTE_IF
    __syncwarp();
    if (own.lane == 0) barrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
  }
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < STAGES; i++) {
    barrier_init(&shared.full[i], 1 + INPUTS_THREADS);
    barrier_init(&shared.empty[i], MULTIPLY_WARPS);
  }
  for (int i = 0; i < UNITS; i++) {
    barrier_init(&shared.unit_full[i], 1);
    barrier_init(&shared.unit_empty[i], MULTIPLY_WARPS);
  }
  barrier_init_fence();
}

// What the launch before wrote is not __restrict__: loads of it must not move in front of the wait for that launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_grouped(const u8* xq, const float* xs, const float* pair_weights, const int* list, const Place* places,
                const int* heads,
#if GROUPS > 1
                const int* __restrict__ topology,
#endif
                const u8* __restrict__ experts, u8* h, float* h_scales, float* parts, u32* counters_begin, float* out,
                const StepHeader* __restrict__ step) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / LANES;
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_launch_before();
  const int all_places = heads[GROUPS];
  if (all_places == 0) return;
  const Inputs inputs = {xq, xs, pair_weights, list, places};
  const Results results = {h, h_scales, parts, out};
  const Counters counters = {counters_begin};
  if (warp < MULTIPLY_WARPS) {
    take_registers<MULTIPLY_REGISTERS>();
    compute(shared, all_places, step->tokens, results, counters);
  } else {
    give_registers<OTHER_REGISTERS>();
    if (warp == WEIGHTS_WARP) {
      copy_weights(shared, experts);
    } else if (warp == UNITS_WARP) {
#if GROUPS > 1
      const int group = topology[EXPERTS + GROUPS + 1 + 3 * blockIdx.x];
#else
      const int group = 0;
#endif
      const int first_place = heads[group];
      draw_units(shared, {group, first_place, heads[group + 1] - first_place}, inputs, counters);
    } else {
      copy_inputs(shared, inputs, results, counters);
    }
  }
}
