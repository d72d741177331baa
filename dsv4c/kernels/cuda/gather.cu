// Rows of a tensor by number, in the type of the result: embedding and gather_rows. A block takes BLOCK chunks of one
// head of one row; blockIdx.y counts on along a wide row.
//
//   X_TYPE, Y_TYPE, ROWS (tokens or logits_rows), HEADS, WIDTH
//   X_ROW, X_HEAD, Y_ROW, Y_HEAD   strides in elements; the last dimension is dense
//   VECTOR    whether every row starts on 16 bytes and has a whole number of chunks; BLOCK threads
#include "chunk.cuh"
#include "step.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) gather(const X_TYPE* x, const int* numbers, Y_TYPE* y,
                                                           const StepHeader* step) {
  const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
  const int first = (blockIdx.y * BLOCK + threadIdx.x) * CHUNK;
  if (row >= step->ROWS || first >= WIDTH) return;
  float values[CHUNK];
  load_chunk<VECTOR, WIDTH>(x + (i64)numbers[row] * X_ROW + (i64)head * X_HEAD, first, values);
  store_chunk<VECTOR, WIDTH>(y + (i64)row * Y_ROW + (i64)head * Y_HEAD, first, values);
}
