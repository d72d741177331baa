// This step's keys into the ring (commit_ring).
//
// Macros: HEAD_DIM, ROTARY; KV_TYPE, KV_STRIDE of kv [T, HEAD_DIM]; RING_FORMAT, RING_ROWS, RING_BYTES,
// RING_EXPONENT_BYTES as in attention_keys.cuh. A block takes a row: grid [T].
#include "state_rows.cuh"
#include "step.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
    commit_ring(const KV_TYPE* kv, u8* ring, u8* ring_exponents, const int* slots, const int* positions,
                const StepHeader* step) {
  const int row = blockIdx.x;
  if (row >= step->tokens) return;
  const int position = positions[row];
  // A later row of this step takes the same place.
  if (position - step->run_first[row] + RING_ROWS < step->run_length[row]) return;
  __shared__ float values[HEAD_DIM];
  for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) values[c] = to_float(kv[(i64)row * KV_STRIDE + c]);
  __syncthreads();
  const i64 at = (i64)slots[row] * RING_ROWS + position % RING_ROWS;
  store_state_row<RING_FORMAT, HEAD_DIM, ROTARY, RING_BYTES, RING_EXPONENT_BYTES, WARPS>(
      ring + at * RING_BYTES, ring_exponents + at * RING_EXPONENT_BYTES, values);
}
