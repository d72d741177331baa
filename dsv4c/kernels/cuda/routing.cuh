// The router's arithmetic: the score of a logit, the best experts of a row, the weights of its choices.
#pragma once

#include "block.cuh"
#include "dtype.cuh"

// As torch's softplus, which is the identity above 20.
__device__ __forceinline__ float score_of(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Ascends with the value; 0 is below all of them.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = value == 0.0f ? 0u : float_to_bits(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The weight of a choice, of the scores of all choices of its row, in their order.
template <int Chosen>
__device__ __forceinline__ float weight_of(const float* scores, int choice, float scale) {
  float sum = 0;
#pragma unroll
  for (int other = 0; other < Chosen; other++) sum += scores[other];
  return scores[choice] / (sum + 1e-20f) * scale;
}

// A warp takes the experts of a row from the largest key down, of equal ones the lower id first. A lane holds the keys
// of OWN experts in a row, sorted, so that a round only compares the first of every lane.
template <int Experts>
struct ExpertRanking {
  static constexpr int OWN = (Experts + LANES - 1) / LANES;
  static constexpr int HELD = OWN > 16 ? 32 : OWN > 8 ? 16 : OWN > 4 ? 8 : OWN > 2 ? 4 : OWN;
  static_assert(OWN <= 32);

  u64 held[HELD];  // key, then the complement of the expert; 0 is none

  // `key_of(expert)`, which is not 0.
  template <typename KeyOf>
  __device__ __forceinline__ explicit ExpertRanking(KeyOf key_of) {
#pragma unroll
    for (int own = 0; own < HELD; own++) {
      const int expert = (int)(threadIdx.x % LANES) * OWN + own;
      held[own] = own < OWN && expert < Experts ? (u64)key_of(expert) << 32 | ~(u32)expert : 0;
    }
    // Bitonic, the largest first.
#pragma unroll
    for (int size = 2; size <= HELD; size *= 2)
#pragma unroll
      for (int stride = size / 2; stride > 0; stride /= 2)
#pragma unroll
        for (int one = 0; one < HELD; one++) {
          const int other = one ^ stride;
          if (other < one) continue;
          const u64 a = held[one], b = held[other];
          const bool swap = (one & size) == 0 ? a < b : a > b;
          held[one] = swap ? b : a;
          held[other] = swap ? a : b;
        }
  }

  // Takes the next expert; true in the one lane that held it, which learns its id.
  __device__ __forceinline__ bool take(int& expert) {
    const u32 key = (u32)(held[0] >> 32);
    const u32 best = __reduce_max_sync(FULL_MASK, key);
    const bool mine = (int)(threadIdx.x % LANES) == __ffs((int)__ballot_sync(FULL_MASK, key == best)) - 1;
    if (mine) {
      expert = (int)~(u32)held[0];
#pragma unroll
      for (int own = 0; own + 1 < HELD; own++) held[own] = held[own + 1];
      held[HELD - 1] = 0;
    }
    return mine;
  }
};
