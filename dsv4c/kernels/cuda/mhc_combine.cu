// The streams behind a sublayer: out[k] = post[k] * y + sum over j of comb[j, k] * X[j], for every row of y [T, WIDTH]
// and X [T, STREAMS, WIDTH]; post float [T, STREAMS], comb float [T, STREAMS, STREAMS]. Macros: those of mhc.cuh and
//   Y_TYPE, Y_STRIDE
//   VECTOR, THREADS  elements of a load; of a block, which has THREADS * VECTOR columns (blockIdx.x) of a row (.y)
#include "mhc.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    mhc_combine(const Y_TYPE* __restrict__ y, const X_TYPE* __restrict__ x, const float* __restrict__ post,
                const float* __restrict__ comb, X_TYPE* __restrict__ out, const StepHeader* __restrict__ step) {
  const int row = blockIdx.y, column = (blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  if (row >= step_rows(step) || column >= WIDTH) return;
  const auto added = *reinterpret_cast<const Pack<Y_TYPE, VECTOR>*>(y + (i64)row * Y_STRIDE + column);
  Pack<X_TYPE, VECTOR> streams[STREAMS];
#pragma unroll
  for (int stream = 0; stream < STREAMS; stream++) streams[stream] = load_stream<VECTOR>(x, row, stream, column);
  post += (i64)row * STREAMS;
  comb += (i64)row * STREAMS * STREAMS;
#pragma unroll
  for (int to = 0; to < STREAMS; to++) {
    const float gate = post[to];
    float weights[STREAMS];
#pragma unroll
    for (int from = 0; from < STREAMS; from++) weights[from] = comb[from * STREAMS + to];
    Pack<X_TYPE, VECTOR> result;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
      float sum = weights[0] * to_float(streams[0].value[i]);
#pragma unroll
      for (int from = 1; from < STREAMS; from++) sum += weights[from] * to_float(streams[from].value[i]);
      result.value[i] = from_float<X_TYPE>(gate * to_float(added.value[i]) + sum);
    }
    *reinterpret_cast<Pack<X_TYPE, VECTOR>*>(out + ((i64)row * STREAMS + to) * WIDTH + column) = result;
  }
}
