// The second part of a split attention: the splits of attention.cu summed up, divided and rounded.
//
// Macros: as attention.cu, of which HEADS, HEAD_DIM, ROTARY, OUT_STRIDE, OUT_HEAD_STRIDE, SINK_TYPE, ROTATE and those
// of attention_keys.cuh count; SPLITS, the third size of that grid. Grid [T, HEADS].
#include "attention_keys.cuh"
#include "block.cuh"
#include "mma.cuh"
#include "rotary.cuh"

constexpr int THREADS = 128;
constexpr int KEY_TILE = 64;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine(const float* sums, const float* peaks, const SINK_TYPE* sink, const int* slots,
                      const int* positions, const int* block_table, const float* frequencies, bf16* out,
                      const StepHeader* step) {
  const int row = blockIdx.x, head = blockIdx.y;
  if (row >= step->tokens) return;
  const KeyPlanes planes = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, slots, positions, block_table};
  RowKeys keys;
  keys.find(planes, step, row);
  // The splits that had keys.
  const int tiles = (keys.count + KEY_TILE - 1) / KEY_TILE;
  const int share = (tiles + SPLITS - 1) / SPLITS;
  const int splits = (tiles + share - 1) / share;

  __shared__ float factors[SPLITS];  // first the peaks
  __shared__ float totals[SPLITS];
  const float* own = peaks + 2 * ((i64)row * SPLITS * HEADS + head);
  for (int split = threadIdx.x; split < splits; split += THREADS) {
    const float2 both = *(const float2*)(own + 2 * HEADS * split);
    factors[split] = both.x;
    totals[split] = both.y;
  }
  const float own_sink = to_float(sink[head]);
  __syncthreads();
  float peak = own_sink;
  for (int split = 0; split < splits; split++) peak = fmaxf(peak, factors[split]);
  __syncthreads();
  for (int split = threadIdx.x; split < splits; split += THREADS) factors[split] = __expf(factors[split] - peak);
  __syncthreads();
  float divisor = __expf(own_sink - peak);
  for (int split = 0; split < splits; split++) divisor += factors[split] * totals[split];

  const float* parts = sums + ((i64)row * SPLITS * HEADS + head) * HEAD_DIM;
  for (int c = 2 * threadIdx.x; c < HEAD_DIM; c += 2 * THREADS) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll 4
    for (int split = 0; split < splits; split++) {
      const float2 part = *(const float2*)(parts + (i64)split * HEADS * HEAD_DIM + c);
      even += factors[split] * part.x;
      odd += factors[split] * part.y;
    }
    even /= divisor;
    odd /= divisor;
    if (ROTATE && c >= HEAD_DIM - ROTARY) {
      even = rounded_to<bf16>(even);
      odd = rounded_to<bf16>(odd);
      rotate_back(even, odd, rotation_at(keys.position, frequencies[(c - (HEAD_DIM - ROTARY)) / 2]));
    }
    *(u32*)(out + (i64)row * OUT_STRIDE + head * OUT_HEAD_STRIDE + c) = pack_bf16(even, odd);
  }
}
