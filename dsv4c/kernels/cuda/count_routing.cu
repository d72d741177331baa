// How often this step's rows chose each expert, added to the counts of the session (count_routing). A block counts PAIRS
// (row, choice) pairs in shared memory, so that an expert that all rows choose costs one atomic a block. Integers: the
// sums do not depend on the order. Macros:
//   EXPERTS, CHOSEN   ids int [T, CHOSEN], counts u64 [EXPERTS]
//   PAIRS             of a block
#include "dtype.cuh"
#include "step.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    count_routing(const int* __restrict__ ids, u64* counts, const StepHeader* __restrict__ step) {
  __shared__ u32 own[EXPERTS];
  const i64 first = (i64)blockIdx.x * PAIRS, pairs = (i64)step->tokens * CHOSEN - first;
  if (pairs <= 0) return;
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) own[expert] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < PAIRS && pair < pairs; pair += THREADS) {
    const u32 expert = (u32)ids[first + pair];
    // The ids of a damaged hash table may be those of no expert.
    if (expert < EXPERTS) atomicAdd(&own[expert], 1u);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
    if (own[expert]) atomicAdd(&counts[expert], (u64)own[expert]);
}
