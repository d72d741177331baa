// What becomes of the products of a unit of the first projection: h, as the second takes it.
#pragma once

#include "experts_prefill_multiply.cuh"

// Rounded to e4m3 and as f16 again, to where the columns of inputs lie: of a panel's 32 a row group has elements 2 r and
// 2 r + 1 of all four pieces.
template <int N>
__device__ __forceinline__ void round_h(Shared& shared, const GatedSums<N>& h, const Multiplier& own) {
  const int g = own.lane / 4;
  u8* const column = shared.rounded + (own.panel * 4 + g / 2) * (N * 16) + own.row_group * 4 + g % 2 * 2;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const int pair = first_pair(own.lane, j);
    const float2 scales = *(const float2*)&shared.scales[pair];
    const u32 codes = pack_e4m3(h.low(j) * inverse_power(scales.x), h.high(j) * inverse_power(scales.y));
    const u32 both = multiply_f16(f16_of_low_e4m3(codes), f16_pair(scales.x * H_TIMES, scales.y * H_TIMES));
    u8* const to = column + pair * 16;
    *(u16*)to = (u16)both, *(u16*)(to + 16) = (u16)(both >> 16);
  }
}

// The strip's 128 columns of h, under one e4m3 scale for each pair, to global memory: a step of the inputs of w2.
template <int N>
__device__ __forceinline__ void finish_h(Shared& shared, const Sums<N>& sums, const Unit& unit, const Multiplier& own,
                                         const Results& results) {
  const GatedSums<N> gated(sums, unit, own.lane);
  gated.find_maxima(shared.maxima[own.panel * 4 + own.row_group], own.lane);
  meet();
  const int thread = threadIdx.x;
  if (thread < N) shared.scales[thread] = scale_of(shared.maxima, thread);
  meet();
  round_h(shared, gated, own);
  meet();
  u8* const to = results.h + (begin_of(unit.place, unit.first) * TILES2 + unit.strip * N) * PAIR_BYTES;
  for (int i = thread * 16; i < N * PAIR_BYTES; i += MULTIPLY_THREADS * 16)
    *(uint4*)(to + i) = *(const uint4*)(shared.rounded + i);
  global_proxy_fence();
}
