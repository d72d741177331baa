// moe_ffn, last launch (experts.cuh): the parts of a row, added in the order of its choices. Macros: WIDTH (D),
// CHOICES, OUT_STRIDE. Parameters: parts [P, WIDTH], out [T, WIDTH], step.
#include "dtype.cuh"
#include "step.cuh"

// Grid: stretches of 1024 columns, rows.
extern "C" __global__ void __launch_bounds__(256)
experts_sum(const float* __restrict__ parts, float* __restrict__ out, const StepHeader* __restrict__ step) {
  const int row = blockIdx.y;
  if (row >= step->tokens) return;
  const float* const from = parts + (i64)row * CHOICES * WIDTH;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = blockIdx.x * 1024 + i * 256 + threadIdx.x;
    if (column >= WIDTH) return;
    float sum = 0;
#pragma unroll
    for (int choice = 0; choice < CHOICES; choice++) sum += from[choice * WIDTH + column];
    out[(i64)row * OUT_STRIDE + column] = sum;
  }
}
