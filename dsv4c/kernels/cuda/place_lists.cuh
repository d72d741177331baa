// One block turns the experts of all pairs (row, choice) into the lists that the experts' kernel works off. Macros:
//   EXPERTS, CHOICES, X_ROWS  pairs are X_ROWS * CHOICES at most
//   TILE                      pairs of a place at most
//   GROUPS                    of SMs; above 1 `topology` says the order of experts (dsv4c/graph/topology.py)
//   THREADS                   of the block, EXPERTS or more
//   MORE_COUNTERS             that are zeroed behind those of the places
// Everything follows from the experts alone: the pairs of an expert ascend, and no run differs from another.
#pragma once

#include "block.cuh"
#include "dtype.cuh"

// Expert, its first pair in the list, pairs, 0.
typedef int4 Place;

constexpr int PAIRS = X_ROWS * CHOICES;
constexpr int PLACES = (EXPERTS < PAIRS ? EXPERTS : PAIRS) + (PAIRS - (EXPERTS < PAIRS ? EXPERTS : PAIRS)) / TILE;
constexpr int LIST_WARPS = THREADS / LANES, CHUNKS = (PAIRS + LANES - 1) / LANES;
// A warp with a stretch of the pairs counts on its own.
constexpr int STRETCHES = CHUNKS < LIST_WARPS ? CHUNKS : LIST_WARPS;
constexpr int LONGEST = (CHUNKS + STRETCHES - 1) / STRETCHES;  // chunks of 32 pairs in a stretch
constexpr int AHEAD = LONGEST < 8 ? LONGEST : 8;               // chunks whose experts are loaded together
constexpr int HISTOGRAM_BYTES = STRETCHES * EXPERTS * 4;       // dynamic shared memory

// A parameter that not every kernel has.
#if GROUPS > 1
#define TOPOLOGY topology
#else
#define TOPOLOGY nullptr
#endif

// What the lists go to.
struct PlaceLists {
  int* list;
  Place* places;
  int* heads;
  u32* counters;  // one a place, then more
};

// The part of the topology that a thread uses: it may be loaded long before.
struct Rank {
  int expert;      // of rank threadIdx.x
  int group_rank;  // first of group threadIdx.x

  __device__ __forceinline__ explicit Rank(const int* topology) {
    const int thread = (int)threadIdx.x;
#if GROUPS > 1
    expert = topology[min(thread, EXPERTS - 1)];
    group_rank = topology[EXPERTS + min(thread, GROUPS)];
#else
    expert = thread;
    group_rank = thread == 0 ? 0 : EXPERTS;
#endif
  }
};

// A barrier of the block has to lie between this and `list_places`.
__device__ __forceinline__ void clear_histograms(u32* histograms) {
  for (int i = threadIdx.x; i < STRETCHES * EXPERTS; i += THREADS) histograms[i] = 0;
}

// Calls `visit(pair, expert)` for the pairs of the warp's stretch, 32 at a time; beyond the last the expert is -1.
template <typename Visit>
__device__ __forceinline__ void for_stretch(const int* experts, int pairs, Visit visit) {
  const int chunks = (pairs + LANES - 1) / LANES, longest = (chunks + STRETCHES - 1) / STRETCHES;
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int begin = warp * longest, end = min(begin + longest, chunks);
  for (int chunk = begin; chunk < end; chunk += AHEAD) {
    int loaded[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int pair = (chunk + i) * LANES + lane;
      loaded[i] = chunk + i < end && pair < pairs ? experts[pair] : -1;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (chunk + i < end) visit((chunk + i) * LANES + lane, loaded[i]);
  }
}

// `experts` of all pairs, in shared or global memory, and `histograms`, both behind a barrier of the block.
__device__ __forceinline__ void list_places(const int* experts, int pairs, const Rank& rank, u32* histograms,
                                            const PlaceLists& to) {
  __shared__ int first_of[EXPERTS];
  __shared__ int places_before[EXPERTS + 1];
  __shared__ int warp_pairs[LIST_WARPS], warp_places[LIST_WARPS];
  const int thread = (int)threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  u32* const own_histogram = histograms + warp * EXPERTS;
  if (warp < STRETCHES)
    for_stretch(experts, pairs, [&](int, int expert) {
      if (expert >= 0) atomicAdd(&own_histogram[expert], 1u);
    });
  __syncthreads();

  // A thread has a rank: each histogram becomes what the stretches before have of the expert.
  int count = 0;
  if (thread < EXPERTS) {
#pragma unroll
    for (int stretch = 0; stretch < STRETCHES; stretch++) {
      u32& entry = histograms[stretch * EXPERTS + rank.expert];
      const int more = (int)entry;
      entry = (u32)count;
      count += more;
    }
  }
  const int own_places = (count + TILE - 1) / TILE;
  int first = count, first_place = own_places;  // inclusive sums over the ranks of the warp, then of the block
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const int pairs_below = __shfl_up_sync(FULL_MASK, first, lanes);
    const int places_below = __shfl_up_sync(FULL_MASK, first_place, lanes);
    if (lane >= lanes) first += pairs_below, first_place += places_below;
  }
  if (lane == LANES - 1) warp_pairs[warp] = first, warp_places[warp] = first_place;
  __syncthreads();
  first -= count, first_place -= own_places;
#pragma unroll
  for (int other = 0; other < (EXPERTS + LANES - 1) / LANES; other++)
    if (other < warp) first += warp_pairs[other], first_place += warp_places[other];
  if (thread < EXPERTS) {
    first_of[rank.expert] = first;
    places_before[thread] = first_place;
    if (thread == EXPERTS - 1) places_before[EXPERTS] = first_place + own_places;
    for (int i = 0; i < own_places; i++) {
      to.places[first_place + i] = make_int4(rank.expert, first + i * TILE, min(TILE, count - i * TILE), 0);
      to.counters[first_place + i] = 0;
    }
  }
  __syncthreads();

  if (thread <= GROUPS) to.heads[thread] = places_before[rank.group_rank];
  for (int i = thread; i < MORE_COUNTERS; i += THREADS) to.counters[PLACES + i] = 0;
  if (warp < STRETCHES)
    for_stretch(experts, pairs, [&](int pair, int expert) {
      const u32 same = __match_any_sync(FULL_MASK, expert);
      const u32 before = same & ((1u << lane) - 1);
      if (expert >= 0) to.list[first_of[expert] + (int)own_histogram[expert] + __popc(before)] = pair;
      if (LONGEST == 1) return;
      __syncwarp();
      if (expert >= 0 && before == 0) own_histogram[expert] += (u32)__popc(same);
      __syncwarp();
    });
}
