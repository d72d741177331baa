// The best entries of each row among the best of its splits (select.cu).
//
// Macros: TOPK, RATIO, SPLIT_ENTRIES, OUT_STRIDE as in select.cu; SPLITS, the second size of that grid; CAPACITY,
// candidates held at a time, at least TOPK + 4 * 1024. Grid [T].
#include "block.cuh"
#include "step.cuh"

#define BEST_THREADS 1024
#include "best.cuh"

extern "C" __global__ void __launch_bounds__(BEST_THREADS)
    select_merge(const u32* candidate_keys, const int* candidate_ids, const int* positions, int* out,
                 const StepHeader* step) {
  const int row = blockIdx.x;
  if (row >= step->tokens) return;
  const int visible = (positions[row] + 1) / RATIO;
  if (visible <= TOPK) {
    for (int i = threadIdx.x; i < TOPK; i += BEST_THREADS) out[(i64)row * OUT_STRIDE + i] = i < visible ? i : -1;
    return;
  }
  const int share = max(SPLIT_ENTRIES, ((visible + SPLITS - 1) / SPLITS + 7) / 8 * 8);
  const int splits = (visible + share - 1) / share;
  // Every split but the last has TOPK candidates: SPLIT_ENTRIES is no less.
  const int candidates = (splits - 1) * TOPK + min(TOPK, visible - (splits - 1) * share);

  DYNAMIC_SHARED(memory);
  __shared__ BestScratch scratch;
  u32* keys = (u32*)memory;
  int* ids = (int*)(keys + CAPACITY);
  Best best(keys, ids, &scratch);
  constexpr int OWN = 4;
  candidate_keys += (i64)row * SPLITS * TOPK;
  candidate_ids += (i64)row * SPLITS * TOPK;
  for (int first = 0; first < candidates; first += OWN * BEST_THREADS) {
    if (best.count + OWN * BEST_THREADS > CAPACITY) best.shrink();
    u32 own_keys[OWN];
    int own_ids[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int at = first + threadIdx.x * OWN + i;
      own_keys[i] = at < candidates ? candidate_keys[at] : 0;
      own_ids[i] = at < candidates ? candidate_ids[at] : 0;
    }
    best.append(own_keys, own_ids);
  }
  best.shrink();
  for (int i = threadIdx.x; i < TOPK; i += BEST_THREADS) out[(i64)row * OUT_STRIDE + i] = ids[i];
}
