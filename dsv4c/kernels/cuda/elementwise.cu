// One operation of two tensors of equal shape, in float32: add or swiglu. A block takes BLOCK chunks of one head of one
// row; blockIdx.y counts on along a wide row.
//
//   OPERATION (add or swiglu), LIMIT (of swiglu), A_TYPE, B_TYPE, Y_TYPE, ROWS (tokens or logits_rows), HEADS, WIDTH
//   A_ROW, A_HEAD, B_ROW, B_HEAD, Y_ROW, Y_HEAD   strides in elements; the last dimension is dense
//   VECTOR    whether every row starts on 16 bytes and has a whole number of chunks; BLOCK threads
#include "chunk.cuh"
#include "step.cuh"

__device__ __forceinline__ float add(float a, float b) { return a + b; }

__device__ __forceinline__ float swiglu(float gate, float up) {
  const float limit = (float)LIMIT;
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.0f + expf(-gate)) * up;
}

extern "C" __global__ void __launch_bounds__(BLOCK) elementwise(const A_TYPE* a, const B_TYPE* b, Y_TYPE* y,
                                                                const StepHeader* step) {
  const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
  const int first = (blockIdx.y * BLOCK + threadIdx.x) * CHUNK;
  if (row >= step->ROWS || first >= WIDTH) return;
  float left[CHUNK], right[CHUNK];
  load_chunk<VECTOR, WIDTH>(a + (i64)row * A_ROW + (i64)head * A_HEAD, first, left);
  load_chunk<VECTOR, WIDTH>(b + (i64)row * B_ROW + (i64)head * B_HEAD, first, right);
#pragma unroll
  for (int i = 0; i < CHUNK; i++) left[i] = OPERATION(left[i], right[i]);
  store_chunk<VECTOR, WIDTH>(y + (i64)row * Y_ROW + (i64)head * Y_HEAD, first, left);
}
