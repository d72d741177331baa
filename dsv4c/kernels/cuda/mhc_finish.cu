// From mixing logits to results: the collapsed input of a sublayer [T, WIDTH], normalised where NORM; and where MIXER
// the float32 gates post [T, STREAMS] and comb [T, STREAMS, STREAMS] that mhc_combine takes. Macros: those of mhc.cuh,
//   MIX_LOGITS, SPLITS    as in mhc_logits.cu: partial float [T, SPLITS, MIX_LOGITS + 1]
//   SCALE_TYPE, BASE_TYPE, NORM_TYPE   element types of the weights
//   MIXER, ITERATIONS     1: MIX_LOGITS are n for pre, n for post, n * n for comb and its Sinkhorn rounds; 0: pre only
//   NORM                  1: rms_norm with norm_weight [WIDTH] and EPS
//   HC_EPS, NORM_EPS, EPS
//   VECTOR                elements of a load
//   THREADS               of a block
//   GATE_BLOCKS, GROUP_WARPS  the first blocks make the gates of as many rows as they have groups of that many warps;
//                         the CAPACITY blocks behind them collapse a row each, which does not need the gates
// Parameters: x, partial, scale, base, norm_weight where NORM, collapsed, post and comb where MIXER, step.
#include "mhc.cuh"

constexpr int WARPS = THREADS / LANES;
constexpr int COLUMNS = MIX_LOGITS + 1;
constexpr int PARTS = (WIDTH / VECTOR + THREADS - 1) / THREADS;
constexpr int GROUPS = WARPS / GROUP_WARPS;

#if NORM
#define NORM_PARAMETER const NORM_TYPE *__restrict__ norm_weight,
#else
#define NORM_PARAMETER
#endif
#if MIXER
#define GATE_PARAMETERS float *__restrict__ post, float *__restrict__ comb,
#else
#define GATE_PARAMETERS
#endif

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float rsqrt_of_mean(float squares) {
  return rsqrtf(squares / (float)(STREAMS * WIDTH) + (float)NORM_EPS);
}

// The weights of the streams in the collapse, for all threads. Neighbouring lanes have the columns, the others the
// splits; few splits are added by every warp for itself, which saves the barriers.
constexpr int PRE_LANES = STREAMS < 2 ? 2 : STREAMS < 4 ? 4 : STREAMS < 8 ? 8 : STREAMS < 16 ? 16 : 32;
constexpr int PARTS_A_WARP = LANES / PRE_LANES;
constexpr bool ALONE = SPLITS <= 4 * PARTS_A_WARP;
__device__ __forceinline__ void collapse_weights(const float* partial, const SCALE_TYPE* scale, const BASE_TYPE* base,
                                                 float (*sums)[PRE_LANES], float (&pre)[STREAMS]) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, column = lane % PRE_LANES;
  const float factor = to_float(scale[0]), offset = column < STREAMS ? to_float(base[column]) : 0.0f;
  float sum = 0;
  if (column <= STREAMS) {
#pragma unroll 4
    for (int split = (ALONE ? 0 : warp * PARTS_A_WARP) + lane / PRE_LANES; split < SPLITS;
         split += (ALONE ? 1 : WARPS) * PARTS_A_WARP)
      sum += partial[split * COLUMNS + (column < STREAMS ? column : MIX_LOGITS)];
  }
#pragma unroll
  for (int lanes = PRE_LANES; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, lanes);
  if (!ALONE) {
    if (lane < PRE_LANES) sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[0][column];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum += sums[other][column];
  }
  const float squares = __shfl_sync(FULL_MASK, sum, STREAMS);
  const float own = sigmoid(sum * rsqrt_of_mean(squares) * factor + offset) + (float)HC_EPS;
#pragma unroll
  for (int stream = 0; stream < STREAMS; stream++) pre[stream] = __shfl_sync(FULL_MASK, own, stream);
}

#if MIXER
// comb of one row, by one thread: the logits [STREAMS, STREAMS] are in `m`.
__device__ __forceinline__ void sinkhorn(float (&m)[STREAMS][STREAMS]) {
  const float eps = (float)HC_EPS;
  // Rounds depend on one another, and exact quotients would double the time of each. The error of these does not pile
  // up: every round brings the sums back to one.
  const auto divide_columns = [&] {
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
      float sum = m[0][j];
#pragma unroll
      for (int i = 1; i < STREAMS; i++) sum += m[i][j];
      const float factor = __fdividef(1.0f, sum + eps);
#pragma unroll
      for (int i = 0; i < STREAMS; i++) m[i][j] *= factor;
    }
  };
#pragma unroll
  for (int i = 0; i < STREAMS; i++) {
    float peak = m[i][0], sum = 0;
#pragma unroll
    for (int j = 1; j < STREAMS; j++) peak = fmaxf(peak, m[i][j]);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) sum += m[i][j] = expf(m[i][j] - peak);
#pragma unroll
    for (int j = 0; j < STREAMS; j++) m[i][j] = m[i][j] / sum + eps;
  }
  divide_columns();
#pragma unroll 1
  for (int round = 1; round < ITERATIONS; round++) {
#pragma unroll
    for (int i = 0; i < STREAMS; i++) {
      float sum = m[i][0];
#pragma unroll
      for (int j = 1; j < STREAMS; j++) sum += m[i][j];
      const float factor = __fdividef(1.0f, sum + eps);
#pragma unroll
      for (int j = 0; j < STREAMS; j++) m[i][j] *= factor;
    }
    divide_columns();
  }
}

__device__ __forceinline__ void make_gates(const float* partial, const SCALE_TYPE* scale, const BASE_TYPE* base,
                                           float* post, float* comb, int rows) {
  __shared__ float sums[WARPS][COLUMNS];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, member = warp % GROUP_WARPS;
  const int row = blockIdx.x * GROUPS + warp / GROUP_WARPS;
  if (row < (EAGER ? CAPACITY : rows))
    for (int column = STREAMS + lane; column < COLUMNS; column += LANES) {
      float sum = 0;
#pragma unroll 8
      for (int split = member; split < SPLITS; split += GROUP_WARPS)
        sum += partial[((i64)row * SPLITS + split) * COLUMNS + column];
      sums[warp][column] = sum;
    }
  __syncthreads();
  if (row >= rows || member != 0) return;
  float* const own = sums[warp];
  for (int column = STREAMS + lane; column < COLUMNS; column += LANES) {
    float sum = own[column];
#pragma unroll
    for (int other = 1; other < GROUP_WARPS; other++) sum += sums[warp + other][column];
    own[column] = sum;
  }
  __syncwarp();
  const float inverse = rsqrt_of_mean(own[MIX_LOGITS]);
  if (lane < STREAMS) {
    const int column = STREAMS + lane;
    const float logit = own[column] * inverse * to_float(scale[1]) + to_float(base[column]);
    post[(i64)row * STREAMS + lane] = 2.0f * sigmoid(logit);
  }
  if (lane == 0) {
    float m[STREAMS][STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; i++) {
      const int column = 2 * STREAMS + i;
      m[i / STREAMS][i % STREAMS] = own[column] * inverse * to_float(scale[2]) + to_float(base[column]);
    }
    sinkhorn(m);
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; i++) comb[(i64)row * STREAMS * STREAMS + i] = m[i / STREAMS][i % STREAMS];
  }
}
#endif

// 64 registers; more in the widest rows.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS < 1024 ? 1024 / THREADS : 1)
    mhc_finish(const X_TYPE* __restrict__ x, const float* __restrict__ partial, const SCALE_TYPE* __restrict__ scale,
               const BASE_TYPE* __restrict__ base, NORM_PARAMETER X_TYPE* __restrict__ collapsed, GATE_PARAMETERS
               const StepHeader* __restrict__ step) {
  const int rows = step_rows(step);
#if MIXER
  if (blockIdx.x < GATE_BLOCKS) {
    make_gates(partial, scale, base, post, comb, rows);
    return;
  }
#endif
  __shared__ float sums[WARPS][PRE_LANES];
  const int row = blockIdx.x - GATE_BLOCKS;
  if (!EAGER && row >= rows) return;
  // EAGER: the streams are on their way while the weights are worked out. Otherwise there are other blocks to wait for,
  // and more of them if they hold less.
  Pack<X_TYPE, VECTOR> streams[EAGER ? PARTS : 1][STREAMS];
  const auto load = [&](int part, Pack<X_TYPE, VECTOR>(&to)[STREAMS]) {
    const int column = (part * THREADS + threadIdx.x) * VECTOR;
    if (column >= WIDTH) return;
#pragma unroll
    for (int stream = 0; stream < STREAMS; stream++) to[stream] = load_stream<VECTOR>(x, row, stream, column);
  };
  if (EAGER) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) load(part, streams[EAGER ? part : 0]);
  }
  float pre[STREAMS];
  collapse_weights(partial + (i64)row * SPLITS * COLUMNS, scale, base, sums, pre);

  Pack<X_TYPE, VECTOR> result[PARTS];
  float squares = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    if ((part * THREADS + threadIdx.x) * VECTOR >= WIDTH) break;
    Pack<X_TYPE, VECTOR>(&own)[STREAMS] = streams[EAGER ? part : 0];
    if (!EAGER) load(part, own);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
      float sum = pre[0] * to_float(own[0].value[i]);
#pragma unroll
      for (int stream = 1; stream < STREAMS; stream++) sum += pre[stream] * to_float(own[stream].value[i]);
      result[part].value[i] = from_float<X_TYPE>(sum);
      const float rounded = to_float(result[part].value[i]);
      squares += rounded * rounded;
    }
  }
#if NORM
  __shared__ float square_sums[WARPS];
  squares = block_sum<WARPS>(squares, square_sums);
  const float factor = rsqrtf(squares / (float)WIDTH + (float)EPS);
#endif
  if (row >= rows) return;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int column = (part * THREADS + threadIdx.x) * VECTOR;
    if (column >= WIDTH) break;
#if NORM
    const auto weight = *reinterpret_cast<const Pack<NORM_TYPE, VECTOR>*>(norm_weight + column);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      result[part].value[i] =
          from_float<X_TYPE>(to_float(result[part].value[i]) * factor * to_float(weight.value[i]));
#endif
    *reinterpret_cast<Pack<X_TYPE, VECTOR>*>(collapsed + (i64)row * WIDTH + column) = result[part];
  }
}
