// linear and grouped_linear for few rows, on tensor cores: bf16 x [T, GROUPS * COLUMNS] times a stored matrix
// [GROUPS * ROWS, COLUMNS] transposed, group by group, accumulated in float32 -> out [T, GROUPS * ROWS]. Every byte of
// the matrix is read once. Macros: those of weight.cuh and
//   X_STRIDE              elements from one row of x to the next; rows begin at multiples of 16 bytes
//   OUT_TYPE, OUT_STRIDE  float or bf16
//   ROWS
//   HEAD                  1: the rows are the R that want logits, 0: the T of the step
//   TOKEN_GROUPS          rows of x are at most 8 times this
//   ROW_WARPS, K_WARPS    warps of a block: by tiles of 16 rows of the matrix, and by columns of these
//   DEPTH                 chunks of weights on their way
//   MIN_BLOCKS            on an SM
// Parameters: x, matrix, scales where SCALED, out, step.
#include "product.cuh"
#include "step.cuh"

#if SCALED
#define SCALES_PARAMETER const S_TYPE* __restrict__ scales,
#else
#define SCALES_PARAMETER
#endif

// Up to NT * 8 rows of x: a block has ROW_WARPS tiles of 16 rows of one group, and reads them once.
template <int NT>
__device__ __forceinline__ void stream(const bf16* x, const W_TYPE* matrix, const S_TYPE* scales, OUT_TYPE* out,
                                       int tokens, float4* partial) {
  const int warp = threadIdx.x / LANES, row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;
  const int g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
  const int first_row = (blockIdx.x * ROW_WARPS + row_warp) * 16;

  Lines<1> lines;
#pragma unroll
  for (int half = 0; half < 2; half++)
    // A tile past the end reads the last row again.
    lines.set(0, half, matrix, scales, blockIdx.y * ROWS + min(first_row + g + half * 8, ROWS - 1));
  GlobalTokens<NT, false> rows;
#pragma unroll
  for (int n = 0; n < NT; n++)
    rows.row[n] = n * 8 + g < tokens ? x + (i64)(n * 8 + g) * X_STRIDE + blockIdx.y * COLUMNS : nullptr;

  float acc[1][NT][4] = {};
  multiply_rows<DEPTH>(acc, lines, rows, k_warp, K_WARPS, tokens);
  add_warps<K_WARPS>(acc, partial, row_warp, k_warp);
  if (k_warp > 0) return;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first_row + g + i / 2 * 8, token = n * 8 + 2 * t + i % 2;
      if (row < ROWS && token < tokens)
        out[(i64)token * OUT_STRIDE + blockIdx.y * ROWS + row] = from_float<OUT_TYPE>(acc[0][n][i]);
    }
}

// Grid: tiles of 16 * ROW_WARPS rows, groups.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * K_WARPS * 32, MIN_BLOCKS)
linear_stream(const bf16* __restrict__ x, const W_TYPE* __restrict__ matrix, SCALES_PARAMETER
              OUT_TYPE* __restrict__ out, const StepHeader* __restrict__ step) {
#if !SCALED
  const S_TYPE* const scales = nullptr;
#endif
  __shared__ float4 partial[K_WARPS == 1 ? 1 : ROW_WARPS * (K_WARPS - 1) * TOKEN_GROUPS * LANES];
  const int tokens = HEAD ? step->logits_rows : step->tokens;
  if (tokens == 0) return;
  stream<TOKEN_GROUPS>(x, matrix, scales, out, tokens, partial);
}
