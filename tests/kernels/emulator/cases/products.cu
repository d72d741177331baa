// One warp: out [16, 8] = a [16, 16] times b [16, 8], bf16, with operands by way of shared memory; and copies that have
// not been waited for.
#include "async.cuh"
#include "block.cuh"
#include "mma.cuh"
#include "step.cuh"

extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, const StepHeader*) {
  __shared__ __align__(16) bf16 a_tile[16 * 16];
  __shared__ __align__(16) bf16 b_tile[16 * 8];
  const int lane = threadIdx.x;
  cp_async_16(a_tile + 8 * lane, a + 8 * lane);
  cp_async_16(b_tile + 8 * (lane % 16), b + 8 * (lane % 16));
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  u32 a_part[4], b_part[2];
  // Matrices: rows 0-7 and 8-15 of the left half, then of the right one.
  ldmatrix_x4(a_part, a_tile + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x2_trans(b_part, b_tile + lane % 16 * 8);
  float d[4] = {1, 1, 1, 1};
  mma_m16n8k16_bf16(d, a_part, b_part);
  const int row = lane / 4, column = lane % 4 * 2;
  out[row * 8 + column] = d[0];
  out[row * 8 + column + 1] = d[1];
  out[(row + 8) * 8 + column] = d[2];
  out[(row + 8) * 8 + column + 1] = d[3];
}

// Row i of out: copy i as seen after the first wait, which leaves the second group under way; then after the second.
extern "C" __global__ void copies(const float* x, float* out, const StepHeader*) {
  __shared__ __align__(16) float tile[12];
  if (threadIdx.x == 0) {
    cp_async_16(tile, x);
    cp_async_commit();
    cp_async_16(tile + 4, x + 4);
    cp_async_16(tile + 8, x + 8, false);
    cp_async_commit();
    cp_async_wait<1>();
    for (int i = 0; i < 12; i++) out[i] = tile[i];
    cp_async_wait<0>();
    for (int i = 0; i < 12; i++) out[12 + i] = tile[i];
  }
}
