// The router: k experts of each row by score (route_topk) or by token id (route_hash) and their weights, which are the
// scores sqrt(softplus(logit)) over their sum. A warp has a row. Macros:
//   EXPERTS, LOGITS_STRIDE  logits float [T, EXPERTS], elements from one row to the next
//   CHOSEN                  k
//   SCALE                   what the weights of a row add up to
//   BIASED, BIAS_TYPE       1: route_topk with a bias [EXPERTS] of that type, 0: route_hash
//   WARPS                   rows of a block
// Results: ids int [T, CHOSEN], weights float [T, CHOSEN].
#include "block.cuh"
#include "dtype.cuh"
#include "step.cuh"

// As torch's softplus, which is the identity above 20.
__device__ __forceinline__ float score_of(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// The weights of a row, of the scores that `scores` has of its choices.
__device__ __forceinline__ void write_weights(const float* scores, float* weights) {
  const int lane = threadIdx.x % LANES;
  float sum = 0;
#pragma unroll
  for (int choice = 0; choice < CHOSEN; choice++) sum += scores[choice];
  for (int choice = lane; choice < CHOSEN; choice += LANES)
    weights[choice] = scores[choice] / (sum + 1e-20f) * (float)SCALE;
}

#if BIASED
constexpr int OWN = (EXPERTS + LANES - 1) / LANES;

// Ascends with the value; 0 is below all of them.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = value == 0.0f ? 0u : float_to_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    route_topk(const float* __restrict__ logits, const BIAS_TYPE* __restrict__ bias, int* __restrict__ ids,
               float* __restrict__ weights, const StepHeader* __restrict__ step) {
  __shared__ float chosen[WARPS][CHOSEN];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = blockIdx.x * WARPS + warp;
  if (row >= step->tokens) return;
  float scores[OWN];
  u32 keys[OWN];
#pragma unroll
  for (int own = 0; own < OWN; own++) {
    const int expert = own * LANES + lane;
    keys[own] = 0, scores[own] = 0;
    if (expert < EXPERTS) {
      scores[own] = score_of(logits[(i64)row * LOGITS_STRIDE + expert]);
      keys[own] = ordered(scores[own] + to_float(bias[expert]));
    }
  }
#pragma unroll 1
  for (int choice = 0; choice < CHOSEN; choice++) {
    u32 best = keys[0];
#pragma unroll
    for (int own = 1; own < OWN; own++) best = max(best, keys[own]);
    best = __reduce_max_sync(FULL_MASK, best);
    u32 expert = EXPERTS;
#pragma unroll
    for (int own = OWN - 1; own >= 0; own--)
      if (keys[own] == best) expert = own * LANES + lane;
    expert = __reduce_min_sync(FULL_MASK, expert);
#pragma unroll
    for (int own = 0; own < OWN; own++)
      if (own * LANES + lane == expert) {
        keys[own] = 0;
        chosen[warp][choice] = scores[own];
        ids[(i64)row * CHOSEN + choice] = (int)expert;
      }
  }
  __syncwarp();
  write_weights(chosen[warp], weights + (i64)row * CHOSEN);
}
#else
// table i64 [V, CHOSEN], token_ids int [T].
extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    route_hash(const float* __restrict__ logits, const i64* __restrict__ table, const int* __restrict__ token_ids,
               int* __restrict__ ids, float* __restrict__ weights, const StepHeader* __restrict__ step) {
  __shared__ float chosen[WARPS][CHOSEN];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = blockIdx.x * WARPS + warp;
  if (row >= step->tokens) return;
  const i64* const experts = table + (i64)token_ids[row] * CHOSEN;
  for (int choice = lane; choice < CHOSEN; choice += LANES) {
    const int expert = (int)experts[choice];
    chosen[warp][choice] = score_of(logits[(i64)row * LOGITS_STRIDE + expert]);
    ids[(i64)row * CHOSEN + choice] = expert;
  }
  __syncwarp();
  write_weights(chosen[warp], weights + (i64)row * CHOSEN);
}
#endif
