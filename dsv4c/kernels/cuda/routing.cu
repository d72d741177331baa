// The router: k experts of each row by score (route_topk) or by token id (route_hash) and their weights, which are the
// scores sqrt(softplus(logit)) over their sum. A warp has a row. Macros:
//   EXPERTS, LOGITS_STRIDE  logits float [T, EXPERTS], elements from one row to the next
//   CHOSEN                  k
//   SCALE                   what the weights of a row add up to
//   BIASED, BIAS_TYPE       1: route_topk with a bias [EXPERTS] of that type, 0: route_hash
//   WARPS                   rows of a block
// Results: ids int [T, CHOSEN], weights float [T, CHOSEN].
#include "routing.cuh"
#include "step.cuh"

#if BIASED
extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    route_topk(const float* __restrict__ logits, const BIAS_TYPE* __restrict__ bias, int* __restrict__ ids,
               float* __restrict__ weights, const StepHeader* __restrict__ step) {
#else
// table i64 [V, CHOSEN], token_ids int [T].
extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    route_hash(const float* __restrict__ logits, const i64* __restrict__ table, const int* __restrict__ token_ids,
               int* __restrict__ ids, float* __restrict__ weights, const StepHeader* __restrict__ step) {
#endif
  __shared__ int chosen[WARPS][CHOSEN];
  __shared__ float scores[WARPS][CHOSEN];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = blockIdx.x * WARPS + warp;
  if (row >= step->tokens) return;
  const float* const own_logits = logits + (i64)row * LOGITS_STRIDE;
#if BIASED
  ExpertRanking<EXPERTS> ranking(
      [&](int expert) { return ordered(score_of(own_logits[expert]) + to_float(bias[expert])); });
#pragma unroll 1
  for (int choice = 0; choice < CHOSEN; choice++) {
    int expert;
    if (ranking.take(expert)) chosen[warp][choice] = expert;
  }
#else
  const i64* const experts = table + (i64)token_ids[row] * CHOSEN;
  for (int choice = lane; choice < CHOSEN; choice += LANES) chosen[warp][choice] = (int)experts[choice];
#endif
  __syncwarp();
  for (int choice = lane; choice < CHOSEN; choice += LANES)
    scores[warp][choice] = score_of(own_logits[chosen[warp][choice]]);
  __syncwarp();
  for (int choice = lane; choice < CHOSEN; choice += LANES) {
    ids[(i64)row * CHOSEN + choice] = chosen[warp][choice];
    weights[(i64)row * CHOSEN + choice] = weight_of<CHOSEN>(scores[warp], choice, (float)SCALE);
  }
}
