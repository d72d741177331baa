// The routed experts of a step of very many rows, in one launch of a block on every SM that draws units of work
// (experts_units.cuh). Weights are read from memory once, decoded into registers and multiplied by the tensor cores as
// f16, which holds codes and scales of both sides exactly (experts_prefill_decode.cuh): all products of a row go into one
// float32 sum. h goes through global memory to whoever draws the second projection of its place, and the parts of a row
// are added up in the order of its choices, a strip of columns at a time (experts_units_finish.cuh).
//
// The warps of a block: 16 that multiply, one that draws units, two that copy weights and inputs into rings, and one
// that packs inputs: it writes the rows of every place's pairs, in the form of a ring's stages, for all blocks.
//
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, H_SHIFT (h
// times 2^H_SHIFT stays within f16), SMS, GROUPS (of SMs that share places), TILE (pairs of a place: a multiple of 16 up
// to 128), ROWS (the bucket's), OUT_STRIDE, SHARED_BYTES; WEIGHTS_STAGES, INPUTS_STAGES if they are to be others than
// experts_prefill.cuh says; for measuring, STREAM_ONLY 1 leaves the products out.
#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

#include "experts_prefill_copy.cuh"
#include "experts_prefill_finish.cuh"
#include "experts_units_compute.cuh"
#include "step.cuh"

static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < WEIGHTS_STAGES; i++) {
    barrier_init(&shared.weights_full[i], 1);
    barrier_init(&shared.weights_empty[i], MULTIPLY_WARPS);
  }
  for (int i = 0; i < INPUTS_STAGES; i++) {
    barrier_init(&shared.inputs_full[i], 1);
    barrier_init(&shared.inputs_empty[i], MULTIPLY_WARPS);
  }
  for (int i = 0; i < UNITS; i++) {
    barrier_init(&shared.unit_full[i], LANES);
    barrier_init(&shared.unit_empty[i], MULTIPLY_WARPS);
  }
  barrier_init_fence();
}

// What the launch before wrote is not __restrict__: loads of it must not move in front of the wait for that launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_prefill(const u8* rows, const float* multipliers, const float* pair_weights, const int* list,
                const Place* places, const int* heads,
#if GROUPS > 1
                const int* __restrict__ topology,
#endif
                const u8* __restrict__ experts, u8* packed, u8* h, float* parts, u32* counters_begin, float* out,
                const StepHeader* __restrict__ step) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / LANES;
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_launch_before();
  const int all_places = heads[GROUPS];
  if (all_places == 0) return;
  const Inputs inputs = {rows, multipliers, pair_weights, list, places};
  const Results results = {packed, h, parts, out};
  const Counters counters = {counters_begin};
  if (warp < MULTIPLY_WARPS) {
    take_registers<MULTIPLY_REGISTERS>();
    ComputeUnit compute = {shared, results, Multiplier(shared)};
    compute_units(shared, step->tokens, all_places, counters.strip(0), parts, out, compute);
    return;
  }
  give_registers<OTHER_REGISTERS>();
#if GROUPS > 1
  const int group = topology[EXPERTS + GROUPS + 1 + 3 * blockIdx.x];
#else
  const int group = 0;
#endif
  const Share share = {group, heads[group], heads[group + 1] - heads[group]};
  if (warp == WEIGHTS_WARP)
    copy_weights(shared, experts);
  else if (warp == UNITS_WARP)
    draw_units(shared, share, inputs, counters);
  else if (warp == INPUTS_WARP)
    copy_inputs(shared, results, counters);
  else
    pack_inputs(shared, share, inputs, packed, counters);
}
