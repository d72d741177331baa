// The TOPK largest scores of a stream of entries whose numbers ascend, ties to the lower entry; the survivors stay in
// the order of the stream. The macros TOPK and BEST_THREADS say how many, and the threads of the block, all of which
// call every function but those of one warp.
//
// Scores are kept as sortable keys. Entries are appended in order; where the buffer is full, the TOPK best stay and
// their smallest key decides which later entries are worth appending at all.
#pragma once

#include "block.cuh"
#include "dtype.cuh"

constexpr int BEST_WARPS = BEST_THREADS / LANES;
constexpr int BEST_DIGIT = 8;  // bits decided at a time

// Unsigned keys in the order of the floats; -0 counts as 0.
__device__ __forceinline__ u32 sortable(float score) {
  const u32 bits = float_to_bits(score + 0.0f);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

struct BestScratch {
  u32 bins[1 << BEST_DIGIT];
  u32 warps[BEST_WARPS];
  u32 digit;
  u32 above;
};

struct Best {
  u32* keys;  // shared, as are `ids` and `scratch`
  int* ids;
  BestScratch* scratch;
  int count = 0;
  u32 floor = 0;  // of keys that may still be among the best

  __device__ __forceinline__ Best(u32* keys, int* ids, BestScratch* scratch)
      : keys(keys), ids(ids), scratch(scratch) {}

  // Sum of `value` over the threads before this one, and over all of them. Begins and ends with a barrier.
  __device__ __forceinline__ u32 scan(u32 value, u32& all) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 inclusive = value;
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
      const u32 other = __shfl_up_sync(FULL_MASK, inclusive, lanes);
      if (lane >= lanes) inclusive += other;
    }
    if (lane == LANES - 1) scratch->warps[warp] = inclusive;
    __syncthreads();
    u32 before = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < BEST_WARPS; w++) {
      if (w < warp) before += scratch->warps[w];
      all += scratch->warps[w];
    }
    __syncthreads();
    return before + inclusive - value;
  }

  // Appends those of this thread's SHARE entries that may count, behind those of the threads before it. Keys of 0 are
  // none. There must be room for SHARE * BEST_THREADS.
  template <int SHARE>
  __device__ __forceinline__ void append(const u32 (&new_keys)[SHARE], const int (&new_ids)[SHARE]) {
    u32 own = 0, all;
#pragma unroll
    for (int i = 0; i < SHARE; i++) own += new_keys[i] != 0 && new_keys[i] >= floor;
    int at = count + (int)scan(own, all);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      if (new_keys[i] != 0 && new_keys[i] >= floor) {
        keys[at] = new_keys[i];
        ids[at] = new_ids[i];
        at++;
      }
    }
    count += (int)all;
    __syncthreads();
  }

  // Keeps the TOPK best.
  __device__ __forceinline__ void shrink() {
    if (count <= TOPK) return;
    u32 ones = 0, zeros = 0;
    for (int i = threadIdx.x; i < count; i += BEST_THREADS) ones |= keys[i], zeros |= ~keys[i];
    // The bits in which not all keys are alike, from the highest down.
    const u32 differing = all_or(ones) & all_or(zeros);
    int low = differing ? LANES - __clz((int)differing) : 0;
    u32 bound = low == 32 ? 0 : keys[0] >> low << low;
    u32 needed = TOPK, in_bin = count;
    while (low > 0 && in_bin != needed) {
      const int high = low;
      low = max(0, high - BEST_DIGIT);
      for (int i = threadIdx.x; i < 1 << BEST_DIGIT; i += BEST_THREADS) scratch->bins[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < count; i += BEST_THREADS) {
        if (high == 32 || keys[i] >> high == bound >> high)
          atomicAdd(&scratch->bins[keys[i] >> low & ((1u << (high - low)) - 1)], 1u);
      }
      __syncthreads();
      if (threadIdx.x < LANES) find_digit(needed);
      __syncthreads();
      const u32 digit = scratch->digit;
      bound |= digit << low;
      needed -= scratch->above;
      in_bin = scratch->bins[digit];
      __syncthreads();
    }
    keep(bound, low, needed);
    // An equal key that comes later is worse; above a bound that is not the last key itself it may be better.
    floor = low == 0 ? bound + 1 : bound;
  }

 private:
  __device__ __forceinline__ u32 all_or(u32 bits) {
    bits = __reduce_or_sync(FULL_MASK, bits);
    if (threadIdx.x % LANES == 0) scratch->warps[threadIdx.x / LANES] = bits;
    __syncthreads();
    bits = 0;
#pragma unroll
    for (int w = 0; w < BEST_WARPS; w++) bits |= scratch->warps[w];
    __syncthreads();
    return bits;
  }

  // The bin that holds the `needed`-th largest key, and how many keys are in the bins above it; the first warp.
  __device__ __forceinline__ void find_digit(u32 needed) {
    constexpr int SHARE = (1 << BEST_DIGIT) / LANES;
    const int lane = threadIdx.x, first = (LANES - 1 - lane) * SHARE;  // lane 0 has the largest
    u32 own = 0;
    for (int i = 0; i < SHARE; i++) own += scratch->bins[first + i];
    u32 inclusive = own;
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
      const u32 other = __shfl_up_sync(FULL_MASK, inclusive, lanes);
      if (lane >= lanes) inclusive += other;
    }
    u32 above = inclusive - own;
    if (above >= needed || inclusive < needed) return;
    int digit = first + SHARE - 1;
    while (above + scratch->bins[digit] < needed) above += scratch->bins[digit--];
    scratch->digit = digit;
    scratch->above = above;
  }

  // Keeps the keys above `bound` and the first `ties` equal to it, as far as their bits from `low` on say.
  __device__ __forceinline__ void keep(u32 bound, int low, u32 ties) {
    constexpr int SHARE = 4;
    u32 above_before = 0, ties_before = 0;  // in the parts before
    for (int part = 0; part < count; part += SHARE * BEST_THREADS) {
      u32 own_keys[SHARE], own = 0, all;
      int own_ids[SHARE];
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const int at = part + threadIdx.x * SHARE + i;
        own_keys[i] = at < count ? keys[at] : 0;
        own_ids[i] = at < count ? ids[at] : 0;
        // Two counts in one scan.
        own += relation(own_keys[i], bound, low);
      }
      const u32 before = scan(own, all);
      u32 above = above_before + (before & 0xFFFFu), equal = ties_before + (before >> 16);
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const u32 found = relation(own_keys[i], bound, low);
        const bool kept = found == 1u || (found != 0 && equal < ties);
        if (kept) {
          const int to = (int)(above + min(equal, ties));
          keys[to] = own_keys[i];
          ids[to] = own_ids[i];
        }
        above += found & 0xFFFFu;
        equal += found >> 16;
      }
      above_before += all & 0xFFFFu;
      ties_before += all >> 16;
      __syncthreads();
    }
    count = TOPK;
  }

  // 1: above; 1 << 16: equal; 0: below, or no key.
  __device__ __forceinline__ static u32 relation(u32 key, u32 bound, int low) {
    if (key == 0) return 0;
    return key >> low > bound >> low ? 1u : key >> low == bound >> low ? 1u << 16 : 0u;
  }
};
