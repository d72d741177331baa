// moe_ffn, first launch (experts.cuh): the lists of pairs, and x as the next launch reads it. Macros:
//   X_TYPE, X_STRIDE      of the operator's x
//   COLUMNS, EXPERTS, CHOICES, IDS_STRIDE
//   TILE                  pairs of a tile
//   ACT_GROUP             columns that are rounded to e4m3 together, 0: none
//   PREPARED              1: columns as the lanes take them that multiply by W_TYPE (weight.cuh); 0: as they are
// Parameters: x, ids [T, CHOICES], list [P], tiles, their count, prepared x [T, X_WIDTH], step.
#define SCALED 0
#define W_STRIDE 0
#include "block.cuh"
#include "experts.cuh"
#include "fragments.cuh"
#include "step.cuh"

#if PREPARED
constexpr int X_WIDTH = CHUNKS * CHUNK;
__device__ __forceinline__ int input_place(int k) { return prepared_place(k); }
#else
constexpr int X_WIDTH = COLUMNS;
__device__ __forceinline__ int input_place(int k) { return k; }
#endif

// Grid: EXPERTS blocks, one for each expert's list, then one for each row of x.
constexpr int ROUTE_WARPS = 8, ROUTE_THREADS = ROUTE_WARPS * 32;

__device__ __forceinline__ int expert_of(const int* ids, int pair) {
  return ids[(i64)(pair / CHOICES) * IDS_STRIDE + pair % CHOICES];
}

// Every list comes from all ids alone, so that no block waits for another and the order is that of the pairs.
__device__ __forceinline__ void list_pairs(const int* ids, int expert, int pairs, int* list, Tile* tiles,
                                           int* tile_count) {
  __shared__ int histogram[EXPERTS];
  __shared__ float reduced[ROUTE_WARPS];
  __shared__ int before_warp[ROUTE_WARPS];
  for (int i = threadIdx.x; i < EXPERTS; i += ROUTE_THREADS) histogram[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += ROUTE_THREADS) atomicAdd(&histogram[expert_of(ids, i)], 1);
  __syncthreads();
  const int own = histogram[expert];
  if (own == 0 && expert != EXPERTS - 1) return;
  // Whole numbers below 2^24: exact in float32.
  float pairs_before = 0, tiles_before = 0;
  for (int i = threadIdx.x; i < expert; i += ROUTE_THREADS) {
    pairs_before += (float)histogram[i];
    tiles_before += (float)((histogram[i] + TILE - 1) / TILE);
  }
  const int first = (int)block_sum<ROUTE_WARPS>(pairs_before, reduced);
  const int first_tile = (int)block_sum<ROUTE_WARPS>(tiles_before, reduced);
  const int own_tiles = (own + TILE - 1) / TILE;
  for (int i = threadIdx.x; i < own_tiles; i += ROUTE_THREADS)
    tiles[first_tile + i] = {expert, first + i * TILE, min(TILE, own - i * TILE), 0};
  if (expert == EXPERTS - 1 && threadIdx.x == 0) *tile_count = first_tile + own_tiles;

  // A thread has a stretch of the pairs.
  const int stretch = (pairs + ROUTE_THREADS - 1) / ROUTE_THREADS;
  const int begin = min((int)threadIdx.x * stretch, pairs), end = min(begin + stretch, pairs);
  int mine = 0;
  for (int i = begin; i < end; i++) mine += expert_of(ids, i) == expert;
  int through = mine;  // of the warp's threads up to this one
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, through, lanes);
    if ((int)threadIdx.x % LANES >= lanes) through += other;
  }
  if (threadIdx.x % LANES == LANES - 1) before_warp[threadIdx.x / LANES] = through;
  __syncthreads();
  int place = first + through - mine;
  for (int warp = 0; warp < (int)threadIdx.x / LANES; warp++) place += before_warp[warp];
  for (int i = begin; i < end; i++)
    if (expert_of(ids, i) == expert) list[place++] = i;
}

__device__ __forceinline__ void prepare_row(const X_TYPE* x, X_TYPE* prepared) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (ACT_GROUP == 0) {
    for (int k = threadIdx.x; k < COLUMNS; k += ROUTE_THREADS) prepared[input_place(k)] = x[k];
  } else {
    for (int begin = warp * ACT_GROUP; begin < COLUMNS; begin += ROUTE_WARPS * ACT_GROUP) {
      const int end = min(begin + ACT_GROUP, COLUMNS);
      float amax = 0;
      for (int k = begin + lane; k < end; k += LANES) amax = fmaxf(amax, fabsf(to_float(x[k])));
      const float scale = fp8_scale(warp_max(amax));
      for (int k = begin + lane; k < end; k += LANES)
        prepared[input_place(k)] = rounded_fp8<X_TYPE>(to_float(x[k]), scale);
    }
  }
  for (int k = COLUMNS + threadIdx.x; k < X_WIDTH; k += ROUTE_THREADS) prepared[input_place(k)] = from_float<X_TYPE>(0);
}

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)
experts_route(const X_TYPE* __restrict__ x, const int* __restrict__ ids, int* __restrict__ list,
              Tile* __restrict__ tiles, int* __restrict__ tile_count, X_TYPE* __restrict__ prepared,
              const StepHeader* __restrict__ step) {
  const int row = (int)blockIdx.x - EXPERTS;
  if (row < 0)
    list_pairs(ids, blockIdx.x, step->tokens * CHOICES, list, tiles, tile_count);
  else if (row < step->tokens)
    prepare_row(x + (i64)row * X_STRIDE, prepared + (i64)row * X_WIDTH);
}
