// linear and grouped_linear in float32 for any types, alignment and number of rows: x [T, GROUPS * COLUMNS] times a
// stored matrix [GROUPS * ROWS, COLUMNS] transposed, group by group -> out [T, GROUPS * ROWS]. Macros: those of
// weight.cuh and
//   X_TYPE, X_STRIDE      float or bf16; elements from one row of x to the next
//   OUT_TYPE, OUT_STRIDE  float or bf16
//   ROWS
//   HEAD                  1: the rows are the R that want logits, 0: the T of the step
// Parameters: x, matrix, scales where SCALED, out, step.
#include "step.cuh"
#include "weight.cuh"

#if SCALED
#define SCALES_PARAMETER const S_TYPE* __restrict__ scales,
#else
#define SCALES_PARAMETER
#endif

// Any type, alignment and number of rows, in float32 throughout. A block of 256 threads has 64 rows of the matrix and
// 16 of x; grid: those of the matrix, those of x, groups.
constexpr int BLOCK_M = 64, BLOCK_T = 16, BLOCK_K = 32;

extern "C" __global__ void __launch_bounds__(256)
linear_plain(const X_TYPE* __restrict__ x, const W_TYPE* __restrict__ matrix, SCALES_PARAMETER
             OUT_TYPE* __restrict__ out, const StepHeader* __restrict__ step) {
#if !SCALED
  const S_TYPE* const scales = nullptr;
#endif
  __shared__ float w[BLOCK_M][BLOCK_K + 1], v[BLOCK_T][BLOCK_K + 1];
  const int tokens = HEAD ? step->logits_rows : step->tokens, group = blockIdx.z;
  const int first_row = blockIdx.x * BLOCK_M, first_token = blockIdx.y * BLOCK_T;
  if (first_token >= tokens) return;
  const int row = threadIdx.x % BLOCK_M, token = threadIdx.x / BLOCK_M;
  float sum[4] = {};
  for (int k = 0; k < COLUMNS; k += BLOCK_K) {
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += 256) {
      const int r = first_row + i / BLOCK_K, c = k + i % BLOCK_K;
      w[i / BLOCK_K][i % BLOCK_K] =
          r < ROWS && c < COLUMNS ? weight_at(matrix, scales, group * ROWS + r, c) : 0.0f;
    }
    for (int i = threadIdx.x; i < BLOCK_T * BLOCK_K; i += 256) {
      const int r = first_token + i / BLOCK_K, c = k + i % BLOCK_K;
      v[i / BLOCK_K][i % BLOCK_K] =
          r < tokens && c < COLUMNS ? to_float(x[(i64)r * X_STRIDE + group * COLUMNS + c]) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int c = 0; c < BLOCK_K; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] = fmaf(w[row][c], v[token + 4 * i][c], sum[i]);
    __syncthreads();
  }
  if (first_row + row >= ROWS) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = first_token + token + 4 * i;
    if (r < tokens) out[(i64)r * OUT_STRIDE + group * ROWS + first_row + row] = from_float<OUT_TYPE>(sum[i]);
  }
}
