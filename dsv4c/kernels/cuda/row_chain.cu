// rms_norm, rope, hadamard and fp8_round or fp4_round of rows, any of them, in this order and each rounded to the type
// of the row (dsv4c/graph/fused_ops.py: row_chain). A row is one head of one row of the step.
//
// Parameters: x, then weight if NORM == 2, then positions and inv_freq if ROPE, then the result.
//   X_TYPE, ROWS (tokens or logits_rows), HEADS, WIDTH
//   X_ROW, X_HEAD, Y_ROW, Y_HEAD   strides in elements; the last dimension is dense
//   VECTOR    whether every row starts on 16 bytes and has a whole number of chunks
//   NORM      0 none, 1 without weight, 2 with one of WEIGHT_TYPE; EPS
//   ROPE      channels that turn, the last ones, 0 for none; INVERSE
//   HADAMARD  0 or 1
//   ROUNDING  0 none, 1 e4m3 of the first ROUNDED channels, 2 e2m1 of all, with a scale per GROUP
//   THREADS   for one row: 8 to 32 within a warp, or whole warps; BLOCK threads
//
// A thread holds CHUNKS chunks of a row: chunk c is number c * THREADS + thread. Groups of a scale are whole chunks, so
// that up to 32 neighbouring threads have one.
#include "block.cuh"
#include "chunk.cuh"
#include "quantize.cuh"
#include "rotary.cuh"
#include "step.cuh"

#if THREADS > 32
constexpr int WARPS = THREADS / 32;
#else
constexpr int WARPS = 1;
#endif
constexpr int CHUNKS = (WIDTH + THREADS * CHUNK - 1) / (THREADS * CHUNK);

typedef float Row[CHUNKS][CHUNK];

__device__ __forceinline__ int first_channel(int chunk, int thread) { return (chunk * THREADS + thread) * CHUNK; }

__device__ __forceinline__ void round_row(Row& x) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < CHUNK; i++) x[c][i] = rounded_to<X_TYPE>(x[c][i]);
}

#if NORM
__device__ __forceinline__ float inverse_root(const Row& x, float* partial) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sum += x[c][i] * x[c][i];
#if THREADS > 32
  sum = block_sum<WARPS>(sum, partial);
#else
  sum = warp_sum<THREADS>(sum);
#endif
  return 1.0f / sqrtf(sum / (float)WIDTH + (float)EPS);
}
#endif

#if ROPE
__device__ __forceinline__ void turn_row(Row& x, int thread, int position, const float* inv_freq) {
  constexpr int START = WIDTH - ROPE;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int first = first_channel(c, thread);
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
      const int channel = first + i;
      if (channel < START || channel >= WIDTH) continue;
      const Rotation at = rotation_at(position, inv_freq[(channel - START) / 2]);
#if INVERSE
      rotate_back(x[c][i], x[c][i + 1], at);
#else
      rotate(x[c][i], x[c][i + 1], at);
#endif
    }
  }
}
#endif

#if HADAMARD
// Pairs of channels at growing distance: within a chunk, in neighbouring threads, in the chunks of a thread.
__device__ __forceinline__ void transform_row(Row& x, int thread) {
#pragma unroll
  for (int span = 1; span < CHUNK && span < WIDTH; span *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < CHUNK; i++)
        if (!(i & span)) {
          const float low = x[c][i], high = x[c][i + span];
          x[c][i] = low + high;
          x[c][i + span] = low - high;
        }
#pragma unroll
  for (int span = 1; span < THREADS && span * CHUNK < WIDTH; span *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        const float own = x[c][i], other = __shfl_xor_sync(FULL_MASK, own, span);
        x[c][i] = thread & span ? other - own : own + other;
      }
#pragma unroll
  for (int span = 1; span < CHUNKS; span *= 2)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (!(c & span))
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
          const float low = x[c][i], high = x[c + span][i];
          x[c][i] = low + high;
          x[c + span][i] = low - high;
        }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < CHUNK; i++) x[c][i] *= (float)HADAMARD_SCALE;
}
#endif

#if ROUNDING
__device__ __forceinline__ void round_groups(Row& x, int thread) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int first = first_channel(c, thread);
    float amax = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
      if (first + i < ROUNDED) amax = fmaxf(amax, fabsf(x[c][i]));
    amax = warp_max<GROUP / CHUNK>(amax);
    const float scale = ROUNDING == 1 ? fp8_scale(amax) : fp4_scale(amax);
    const float inverse = inverse_power(scale);
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
      if (first + i < ROUNDED)
        x[c][i] = ROUNDING == 1 ? through_e4m3(x[c][i], scale, inverse) : through_e2m1(x[c][i], scale, inverse);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) row_chain(const X_TYPE* x,
#if NORM == 2
                                                              const WEIGHT_TYPE* weight,
#endif
#if ROPE
                                                              const int* positions, const float* inv_freq,
#endif
                                                              X_TYPE* y, const StepHeader* step) {
#if NORM && THREADS > 32
  __shared__ float partial[WARPS];
#elif NORM
  float* const partial = nullptr;
#endif
  const int item = blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
  const int row = item / HEADS, head = item % HEADS, thread = threadIdx.x % THREADS;
  // Rows of one warp that are none take part in its exchanges.
  const bool there = row < step->ROWS;
  if (THREADS >= 32 && !there) return;

  const X_TYPE* from = x + (i64)row * X_ROW + (i64)head * X_HEAD;
  Row values;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) load_chunk<VECTOR, WIDTH>(from, there ? first_channel(c, thread) : WIDTH, values[c]);

#if NORM
  const float scale = inverse_root(values, partial);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#if NORM == 2
    float weights[CHUNK];
    load_chunk<VECTOR, WIDTH>(weight, first_channel(c, thread), weights);
#endif
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      values[c][i] *= scale;
#if NORM == 2
      values[c][i] *= weights[i];
#endif
    }
  }
  round_row(values);
#endif
#if ROPE
  turn_row(values, thread, there ? positions[row] : 0, inv_freq);
  round_row(values);
#endif
#if HADAMARD
  transform_row(values, thread);
  round_row(values);
#endif
#if ROUNDING
  round_groups(values, thread);
  round_row(values);
#endif

  X_TYPE* to = y + (i64)row * Y_ROW + (i64)head * Y_HEAD;
  if (there)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) store_chunk<VECTOR, WIDTH>(to, first_channel(c, thread), values[c]);
}
