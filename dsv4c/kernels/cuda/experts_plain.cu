// moe_ffn in float32 for any types and sizes (experts.cuh): experts_gate_up_plain and experts_round, or
// experts_down_plain where DOWN. Macros: those of weight.cuh, for the matrix of one expert, and
//   X_TYPE                of x and h
//   EXPERT_STRIDE, S_EXPERT_STRIDE  elements from one expert to the next
//   ROWS                  I (w1 has ROWS rows, w3 the ROWS after them) or D
//   CHOICES, TILE         TILE is 16
//   LIMIT, ACT_GROUP, WEIGHTS_STRIDE  gate_up
// Parameters: as in experts.cu.
#include "block.cuh"
#include "experts.cuh"
#include "step.cuh"
#include "weight.cuh"

#if SCALED
#define SCALES_PARAMETER const S_TYPE* __restrict__ all_scales,
#define EXPERT_SCALES(expert) (all_scales + (i64)(expert) * S_EXPERT_STRIDE)
#else
#define SCALES_PARAMETER
#define EXPERT_SCALES(expert) ((const S_TYPE*)nullptr)
#endif

// 256 threads have 64 rows of the matrix by TILE = 16 pairs, in float32. Grid: blocks of 64 rows, tiles.
constexpr int BLOCK_M = 64, BLOCK_K = 32;

struct PlainOperands {
  float weights[!DOWN ? 2 : 1][BLOCK_M][BLOCK_K + 1];
  float inputs[TILE][BLOCK_K + 1];
};

// sum[m][i]: row `first_row` + threadIdx.x % 64, of w3 for m = 1, by pair threadIdx.x / 64 + 4i.
template <int MATRICES>
__device__ __forceinline__ void multiply_plain(float (&sum)[MATRICES][TILE / 4], const X_TYPE* inputs, const int* list,
                                               const Tile& tile, const W_TYPE* matrix, const S_TYPE* scales,
                                               int first_row, PlainOperands& shared) {
  const int row = threadIdx.x % BLOCK_M, pair = threadIdx.x / BLOCK_M;
  for (int k = 0; k < COLUMNS; k += BLOCK_K) {
    for (int i = threadIdx.x; i < MATRICES * BLOCK_M * BLOCK_K; i += 256) {
      const int m = i / (BLOCK_M * BLOCK_K), r = i / BLOCK_K % BLOCK_M, c = i % BLOCK_K;
      const bool inside = first_row + r < ROWS && k + c < COLUMNS;
      shared.weights[m][r][c] = inside ? weight_at(matrix, scales, m * ROWS + first_row + r, k + c) : 0.0f;
    }
    for (int i = threadIdx.x; i < TILE * BLOCK_K; i += 256) {
      const int r = i / BLOCK_K, c = i % BLOCK_K;
      const bool inside = r < tile.pairs && k + c < COLUMNS;
      const int place = tile.first + r;
      shared.inputs[r][c] =
          inside ? to_float(inputs[(i64)(!DOWN ? list[place] / CHOICES : place) * COLUMNS + k + c]) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < BLOCK_K; c++)
#pragma unroll
      for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int i = 0; i < TILE / 4; i++)
          sum[m][i] = fmaf(shared.weights[m][row][c], shared.inputs[pair + 4 * i][c], sum[m][i]);
    __syncthreads();
  }
}

#if !DOWN
extern "C" __global__ void __launch_bounds__(256)
experts_gate_up_plain(const X_TYPE* __restrict__ x, const int* __restrict__ list, const Tile* __restrict__ tiles,
                const int* __restrict__ tile_count, const float* __restrict__ weights,
                const W_TYPE* __restrict__ matrices, SCALES_PARAMETER X_TYPE* __restrict__ h,
                const StepHeader* __restrict__ step) {
  __shared__ PlainOperands shared;
  if ((int)blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int column = blockIdx.x * BLOCK_M + threadIdx.x % BLOCK_M;
  float sum[2][TILE / 4] = {};
  multiply_plain(sum, x, list, tile, matrices + (i64)tile.expert * EXPERT_STRIDE, EXPERT_SCALES(tile.expert),
                 blockIdx.x * BLOCK_M, shared);
#pragma unroll
  for (int i = 0; i < TILE / 4; i++) {
    const int pair = threadIdx.x / BLOCK_M + 4 * i;
    if (pair >= tile.pairs || column >= ROWS) continue;
    const int entry = list[tile.first + pair];
    const float weight = weights[(i64)(entry / CHOICES) * WEIGHTS_STRIDE + entry % CHOICES];
    const float value = clamped_swiglu(sum[0][i], sum[1][i], (float)LIMIT) * weight;
    h[(i64)(tile.first + pair) * ROWS + column] = from_float<X_TYPE>(value);
  }
}

// h rounded to e4m3 in place: a warp a row. Grid: pairs.
extern "C" __global__ void __launch_bounds__(256)
experts_round(X_TYPE* __restrict__ h, const StepHeader* __restrict__ step) {
  constexpr int GROUP = ACT_GROUP ? ACT_GROUP : 1;
  if ((int)blockIdx.x >= step->tokens * CHOICES) return;
  X_TYPE* const row = h + (i64)blockIdx.x * ROWS;
  for (int begin = threadIdx.x / LANES * GROUP; begin < ROWS; begin += 8 * GROUP) {
    const int end = min(begin + GROUP, ROWS);
    float amax = 0;
    for (int k = begin + threadIdx.x % LANES; k < end; k += LANES) amax = fmaxf(amax, fabsf(to_float(row[k])));
    const float scale = fp8_scale(warp_max(amax));
    for (int k = begin + threadIdx.x % LANES; k < end; k += LANES)
      row[k] = rounded_fp8<X_TYPE>(to_float(row[k]), scale);
  }
}
#else
extern "C" __global__ void __launch_bounds__(256)
experts_down_plain(const X_TYPE* __restrict__ h, const int* __restrict__ list, const Tile* __restrict__ tiles,
             const int* __restrict__ tile_count, const W_TYPE* __restrict__ matrices, SCALES_PARAMETER
             float* __restrict__ parts, const StepHeader* __restrict__ step) {
  __shared__ PlainOperands shared;
  if ((int)blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int row = blockIdx.x * BLOCK_M + threadIdx.x % BLOCK_M;
  float sum[1][TILE / 4] = {};
  multiply_plain(sum, h, list, tile, matrices + (i64)tile.expert * EXPERT_STRIDE, EXPERT_SCALES(tile.expert),
                 blockIdx.x * BLOCK_M, shared);
#pragma unroll
  for (int i = 0; i < TILE / 4; i++) {
    const int pair = threadIdx.x / BLOCK_M + 4 * i;
    if (pair < tile.pairs && row < ROWS) parts[(i64)list[tile.first + pair] * ROWS + row] = sum[0][i];
  }
}
#endif
