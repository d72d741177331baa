// The routed experts of a step of few rows, in one launch of a block on every SM: the weights of the experts hit stream
// from memory once, through a ring in shared memory, past warps that decode and multiply them.
//
// Work is counted in panels (experts_packed.cuh) of the places of the list: first all panels of w13, whose products h
// go to global memory, then all of w2. Each block has a contiguous stretch of both, so that all read about the same
// number of bytes; its weights flow on from the first to the second without a pause, while whoever computes waits for a
// place's h on the counter of that place. Before its first wait a block has done all of its first stretch, and it waits
// for its neighbours alone: not all blocks have to run at once (dsv4c/kernels/experts.md).
//
// The warps of a block:
//   0 to 15   compute, as four warpgroups that share the columns: of each slot of the ring (64 rows x 512 columns),
//             warpgroup w takes the tile w, its warp r the row group r. Each warpgroup keeps its quarter of the inputs.
//   16        copies weights into the ring
//   17 to 19  finish: add up what the four warpgroups have of a panel, in a fixed order; every third panel is a warp's
// Not one more: with five warps on each quarter of an SM a thread has 96 registers, with six only 80. A warp that
// finishes waits for its stores before it counts, which takes longer than a panel: so each has a panel of its own.
//
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, SMS, GROUPS
// (of SMs that share places), TILE (pairs of a place: 8 or 16), ROWS (the bucket's), OUT_STRIDE, SLOTS (of the ring),
// HALVES (1: the places are done in two halves), SHARED_BYTES; for measuring, STREAM_ONLY 1 leaves the products out.
#include "experts_stream_compute.cuh"
#include "experts_stream_finish.cuh"
#include "step.cuh"

template <int TILES>
__device__ __forceinline__ void copy_panel(Shared& shared, Ring<SLOTS>& ring, const u8* panel, u64 policy) {
#pragma unroll 1
  for (int tile = 0; tile < TILES; tile += WARPGROUPS) {
    const int bytes = min(TILES - tile, WARPGROUPS) * TILE_BYTES;
    barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
    barrier_expect(&shared.full[ring.slot], bytes);
    bulk_copy(shared.ring[ring.slot], panel + tile * TILE_BYTES, bytes, &shared.full[ring.slot], policy);
    ring.advance();
  }
}

// One thread feeds the ring.
__device__ __forceinline__ void copy_weights(Shared& shared, const Place* places, const u8* experts) {
  const Stretch& own = shared.own;
  const u64 policy = evict_first_policy();
  Ring<SLOTS> ring;
  for (int i = 0; i < count(own.first); i++) {
    const int panel = panel_of(own.first, i);
    const u8* const expert = experts + (i64)places[panel / PANELS1].expert * RECORD_BYTES;
    copy_panel<TILES1>(shared, ring, expert + panel % PANELS1 * PANEL1_BYTES, policy);
  }
  for (int i = 0; i < count(own.second); i++) {
    const int panel = panel_of(own.second, i);
    const u8* const expert = experts + (i64)places[panel / PANELS2].expert * RECORD_BYTES + SECOND_BYTES;
    copy_panel<TILES2>(shared, ring, expert + panel % PANELS2 * PANEL2_BYTES, policy);
  }
}

// What the launch before wrote is not __restrict__: loads of it must not move in front of the wait for that launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_stream(const u8* xq, const float* xs, const float* pair_weights,
               const int* list, const Place* places, const int* heads,
#if GROUPS > 1
               const int* __restrict__ topology,
#endif
               const u8* __restrict__ experts, bf16* h, float* parts, u32* counters, float* __restrict__ out,
               const StepHeader* __restrict__ step) {
#ifdef DSV4C_EMULATE
  u8* const memory = emulate::dynamic_shared;
#else
  extern __shared__ __align__(128) u8 memory[];
#endif
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32;
  if (thread == 0) {
    for (int slot = 0; slot < SLOTS; slot++)
      barrier_init(&shared.full[slot], 1), barrier_init(&shared.empty[slot], COMPUTE_WARPS);
    for (int buffer = 0; buffer < BUFFERS; buffer++)
      barrier_init(&shared.computed[buffer], COMPUTE_WARPS), barrier_init(&shared.finished[buffer], 1);
    barrier_init_fence();
  }
  launch_dependents();
  wait_for_launch_before();
  // All at once, whatever the lists hold: one way to memory and back.
#if GROUPS > 1
  const int* const own = topology + EXPERTS + GROUPS + 1 + 3 * blockIdx.x;
  const int group = own[0], index = own[1], blocks = own[2];
#else
  const int group = 0, index = blockIdx.x, blocks = SMS;
#endif
  const int first_place = GROUPS > 1 ? heads[group] : 0, places_hit = heads[group + 1] - first_place;
  for (int i = thread; i < MOST_PLACES; i += THREADS) *(int4*)&shared.places[i] = *(const int4*)&places[i];
  for (int i = thread; i < PAIRS; i += THREADS) shared.pairs[i] = list[i];
  if (thread == 0) shared.own = stretch_of(places_hit, index, blocks);
  __syncthreads();

  const Place* const own_places = shared.places + first_place;
  if (warp < COMPUTE_WARPS) {
    compute(shared, own_places, xq, xs, h, counters);
  } else if (warp == COPY_WARP) {
    if (thread % 32 == 0) copy_weights(shared, own_places, experts);
  } else {
    finish(shared, own_places, pair_weights, h, parts, counters, out);
  }
}
