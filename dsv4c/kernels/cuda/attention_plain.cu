// Attention in float32 over keys of any format: for `exact` numerics, and wherever attention.cu does not fit.
//
// Macros, beside those of attention_keys.cuh: HEADS, SCALE, Q_TYPE, Q_STRIDE, Q_HEAD_STRIDE, OUT_STRIDE,
// OUT_HEAD_STRIDE, SINK_TYPE, ROTATE as in attention.cu. HEADS_OF_BLOCK: warps of a block, each of which has one head.
//
// Grid [T, ceil(HEADS/HEADS_OF_BLOCK)]. Keys are decoded in tiles of 32, one a lane for the scores; for the sums a lane
// has every 32nd channel.
#include "attention_keys.cuh"
#include "block.cuh"
#include "rotary.cuh"

constexpr int THREADS = HEADS_OF_BLOCK * LANES;
constexpr int STRIDE = HEAD_DIM | 1;  // odd: the lanes' keys lie in different banks
constexpr int SHARE = (HEAD_DIM + LANES - 1) / LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_plain(const Q_TYPE* q, const KV_TYPE* kv, const u8* ring, const u8* ring_exponents, const u8* entries,
                    const u8* entry_exponents, const int* selected, const SINK_TYPE* sink, const int* slots,
                    const int* positions, const int* block_table, const float* frequencies, Q_TYPE* out,
                    const StepHeader* step) {
  const int row = blockIdx.x;
  if (row >= step->tokens) return;
  const KeyPlanes planes = {kv,       ring,  ring_exponents, entries,    entry_exponents,
                            selected, slots, positions,      block_table};
  __shared__ RowKeys keys;
  if (threadIdx.x == 0) keys.find(planes, step, row);
  __syncthreads();
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int head = blockIdx.y * HEADS_OF_BLOCK + warp;
  const int read = min(head, HEADS - 1);  // warps without a head help to decode

  DYNAMIC_SHARED(memory);
  float* tile = (float*)memory;                              // [LANES, STRIDE]
  float* query = tile + LANES * STRIDE + warp * HEAD_DIM;    // [HEADS_OF_BLOCK, HEAD_DIM]; then the result
  for (int c = lane; c < HEAD_DIM; c += LANES)
    query[c] = to_float(q[(i64)row * Q_STRIDE + read * Q_HEAD_STRIDE + c]);

  const float own_sink = to_float(sink[read]);
  float peak = fmaxf(own_sink, -1e30f), total = 0.0f;
  float sum[SHARE] = {};
  for (int key = 0; key < keys.count; key += LANES) {
    __syncthreads();  // all are done with the tile before
    unsigned present = 0;
    for (int i = 0; i < LANES; i += HEADS_OF_BLOCK) {
      const int own = i + warp;
      if (own >= LANES) continue;
      const KeyPlace place = keys.place(planes, key + own);
      for (int c = lane; c < HEAD_DIM; c += LANES)
        tile[own * STRIDE + c] = key_value(place.row, place.exponents, place.source, c);
    }
    present = __ballot_sync(FULL_MASK, keys.place(planes, key + lane).source != NO_KEY);
    __syncthreads();

    float score = 0.0f;
    for (int c = 0; c < HEAD_DIM; c++) score += query[c] * tile[lane * STRIDE + c];
    score = present >> lane & 1 ? score * (float)(SCALE) : NO_SCORE;
    const float next = fmaxf(peak, warp_max(score));
    const float correction = expf(peak - next), weight = expf(score - next);
    peak = next;
    total = total * correction + warp_sum(weight);
    const float rounded = rounded_to<Q_TYPE>(weight);
#pragma unroll
    for (int i = 0; i < SHARE; i++) sum[i] *= correction;
    for (int k = 0; k < LANES; k++) {
      const float factor = __shfl_sync(FULL_MASK, rounded, k);
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const int c = i * LANES + lane;
        if (c < HEAD_DIM) sum[i] += factor * tile[k * STRIDE + c];
      }
    }
  }

  total += expf(own_sink - peak);
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const int c = i * LANES + lane;
    if (c < HEAD_DIM) query[c] = rounded_to<Q_TYPE>(sum[i] / total);
  }
  __syncwarp();
  if (head >= HEADS) return;
  constexpr int PLAIN = HEAD_DIM - (ROTATE ? ROTARY : 0);
  Q_TYPE* to = out + (i64)row * OUT_STRIDE + head * OUT_HEAD_STRIDE;
  for (int c = lane; c < PLAIN; c += LANES) to[c] = from_float<Q_TYPE>(query[c]);
  for (int i = lane; i < (HEAD_DIM - PLAIN) / 2; i += LANES) {
    float even = query[PLAIN + 2 * i], odd = query[PLAIN + 2 * i + 1];
    rotate_back(even, odd, rotation_at(keys.position, frequencies[i]));
    to[PLAIN + 2 * i] = from_float<Q_TYPE>(even);
    to[PLAIN + 2 * i + 1] = from_float<Q_TYPE>(odd);
  }
}
