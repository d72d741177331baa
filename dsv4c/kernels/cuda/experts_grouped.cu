// The routed experts of a step of many rows, in one launch of a block on every SM that draws units of work
// (experts_units.cuh). Weights are read from memory once, decoded into registers and multiplied by the tensor cores as
// e4m3, a few columns in a sum (experts_grouped_multiply.cuh); h goes through global memory to whoever draws the second
// projection of its place, and the parts of a row are added up in the order of its choices, a strip of columns at a time
// (experts_units_finish.cuh).
//
// The warps of a block: 16 that multiply, one that copies weights into the ring of stages, one that draws units, and two
// that gather the inputs of the pairs into the ring.
//
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, SMS, GROUPS
// (of SMs that share places), TILE (pairs of a place: 16 or 32), ROWS (the bucket's), OUT_STRIDE,
// SHARED_BYTES; WEIGHTS_STAGES if the ring is to have others than experts_grouped.cuh says; for measuring, STREAM_ONLY 1 leaves
// the products out.
#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

#include "experts_grouped_copy.cuh"
#include "experts_grouped_finish.cuh"
#include "experts_units_compute.cuh"
#include "step.cuh"

static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < WEIGHTS_STAGES; i++) {
    barrier_init(&shared.weights_full[i], 1 + INPUTS_THREADS);
    barrier_init(&shared.weights_empty[i], MULTIPLY_WARPS);
  }
  for (int i = 0; i < UNITS; i++) {
    barrier_init(&shared.unit_full[i], LANES);
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
    ComputeUnit compute = {shared, results, Multiplier(shared)};
    compute_units(shared, step->tokens, all_places, counters.strip(0), parts, out, compute);
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
