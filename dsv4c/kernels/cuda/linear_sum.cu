// Second launch of a linear whose columns were split (triton/linear.py): out = the sum of its PARTS float32 results, in
// their order. Macros: WIDTH (columns of out, which is dense), PARTS, OUT_TYPE, HEAD as in linear.cu. Parameters: parts
// [PARTS, T, WIDTH], out [T, WIDTH], step. Grid: stretches of 1024 columns, rows.
#include "dtype.cuh"
#include "step.cuh"

extern "C" __global__ void __launch_bounds__(256)
linear_sum(const float* __restrict__ parts, OUT_TYPE* __restrict__ out, const StepHeader* __restrict__ step) {
  const int tokens = HEAD ? step->logits_rows : step->tokens;
  const int row = blockIdx.y;
  if (row >= tokens) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = blockIdx.x * 1024 + i * 256 + threadIdx.x;
    if (column >= WIDTH) return;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[((i64)part * tokens + row) * WIDTH + column];
    out[(i64)row * WIDTH + column] = from_float<OUT_TYPE>(sum);
  }
}
