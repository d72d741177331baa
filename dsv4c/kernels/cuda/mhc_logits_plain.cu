// The mixing logits of the hyper-connections in float32, for any width and alignment; the results are those of
// mhc_logits.cu. Macros: those of mhc.cuh, FN_TYPE, MIX_LOGITS, SPLITS (blockIdx.x) and ROWS, the rows of a block
// (blockIdx.y). A warp has every WARPS-th logit; the squares' sum counts as the last one.
#include "mhc.cuh"

constexpr int WARPS = 8;
constexpr int DEPTH = STREAMS * WIDTH;
constexpr int COLUMNS = MIX_LOGITS + 1;
constexpr int OWN = (COLUMNS + WARPS - 1) / WARPS;

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    mhc_logits_plain(const X_TYPE* __restrict__ x, const FN_TYPE* __restrict__ fn, float* __restrict__ partial,
                     const StepHeader* __restrict__ step) {
  const int rows = step_rows(step), first_row = blockIdx.y * ROWS;
  if (!EAGER && first_row >= rows) return;
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, split = blockIdx.x;
  const int last = (int)((i64)(split + 1) * DEPTH / SPLITS);

  float sums[OWN][ROWS] = {};
  for (int k = (int)((i64)split * DEPTH / SPLITS) + lane; k < last; k += LANES) {
    float values[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const i64 place = (i64)(first_row + row) * ROW_STRIDE + k / WIDTH * STREAM_STRIDE + k % WIDTH;
      values[row] = first_row + row < (EAGER ? CAPACITY : rows) ? to_float(x[place]) : 0.0f;
    }
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      const int column = own * WARPS + warp;
      if (column >= COLUMNS) break;
      const float weight = column < MIX_LOGITS ? to_float(fn[column * DEPTH + k]) : 0.0f;
#pragma unroll
      for (int row = 0; row < ROWS; row++)
        sums[own][row] += (column < MIX_LOGITS ? weight : values[row]) * values[row];
    }
  }
#pragma unroll
  for (int own = 0; own < OWN; own++) {
    const int column = own * WARPS + warp;
    if (column >= COLUMNS) break;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const float sum = warp_sum(sums[own][row]);
      if (lane == 0 && first_row + row < rows)
        partial[((i64)(first_row + row) * SPLITS + split) * COLUMNS + column] = sum;
    }
  }
}
