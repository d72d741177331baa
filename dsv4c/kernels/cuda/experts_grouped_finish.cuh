// What becomes of the products of a unit: h, or parts of the result, which are added up later.
#pragma once

#include "experts_grouped_multiply.cuh"
#include "quantize.cuh"

// All warps that multiply.
__device__ __forceinline__ void meet() { named_barrier(1, MULTIPLY_THREADS); }

// silu(gate) * up, both clamped; within some 2^-21 of exact, before it is rounded to bf16.
__device__ __forceinline__ float gate_up(float gate, float up) {
  gate = fminf(gate, (float)LIMIT);
  up = fminf(fmaxf(up, -(float)LIMIT), (float)LIMIT);
#ifdef DSV4C_EMULATE
  return gate / (1.0f + expf(-gate)) * up;
#else
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return gate * inverse * up;
#endif
}

// Two numbers in e4m3, the first in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
#ifdef DSV4C_EMULATE
  return to_e4m3(low).bits | (u32)to_e4m3(high).bits << 8;
#else
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// The larger of two magnitudes in bf16, for both halves of a word.
__device__ __forceinline__ u32 larger_halves(u32 x, u32 y) {
#ifdef DSV4C_EMULATE
  return max(x & 0xFFFFu, y & 0xFFFFu) | max(x & 0xFFFF0000u, y & 0xFFFF0000u);
#else
  return __vmaxu2(x, y);
#endif
}

// h = silu(gate) * up * weight of a lane's rows and pairs, as bf16; gate and up are in the same lane.
template <int N>
struct GatedSums {
  u32 of[OWN_PANELS][N / 8];  // two neighbouring pairs, of each eight

  __device__ __forceinline__ GatedSums(const Sums<N>& sums, const Unit& unit, const Multiplier& own) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float2 weights = *(const float2*)&unit.weights[first_pair(own, j)];
#pragma unroll
      for (int panel = 0; panel < OWN_PANELS; panel++) {
        const float* const sum = sums.of[panel] + 4 * j;
        const float gate = sums.factors[panel][0], up = sums.factors[panel][1];
        of[panel][j] = pack_bf16(gate_up(sum[0] * gate, sum[2] * up) * weights.x,
                                 gate_up(sum[1] * gate, sum[3] * up) * weights.y);
      }
    }
  }

  static __device__ __forceinline__ int first_pair(const Multiplier& own, int j) { return j * 8 + own.lane % 4 * 2; }

  // The largest magnitudes of each pair among the rows of a row group.
  __device__ __forceinline__ void find_maxima(Shared& shared, const Multiplier& own) const {
#pragma unroll
    for (int panel = 0; panel < OWN_PANELS; panel++)
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        u32 largest = of[panel][j] & 0x7FFF7FFFu;
#pragma unroll
        for (int lanes = 4; lanes < LANES; lanes *= 2)
          largest = larger_halves(largest, __shfl_xor_sync(FULL_MASK, largest, lanes));
        if (own.lane < 4)
          *(u32*)&shared.maxima[(own.first_panel + panel) * 4 + own.row_group][first_pair(own, j)] = largest;
      }
  }

  // In e4m3, to where the columns of inputs lie: of a panel's 32 a row group has the eight that are bytes 4 r to 4 r +
  // 3 of both halves.
  __device__ __forceinline__ void round(Shared& shared, const Multiplier& own) const {
    const int g = own.lane / 4;
    u8* const column = shared.rounded[own.first_panel * 2 + g / 4] + own.row_group * 4 + g % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int pair = first_pair(own, j);
      const float2 inverses = *(const float2*)&shared.inverses[pair];
#pragma unroll
      for (int panel = 0; panel < OWN_PANELS; panel++) {
        u8* const to = column + panel * 2 * sizeof(shared.rounded[0]) + pair * 16;
        const u32 both = pack_e4m3(bits_to_float(of[panel][j] << 16) * inverses.x,
                                   bits_to_float(of[panel][j] & 0xFFFF0000u) * inverses.y);
        to[0] = (u8)both, to[16] = (u8)(both >> 8);
      }
    }
  }
};

// The strip's 128 columns of h in e4m3, under one scale for each pair, to global memory.
template <int N>
__device__ __forceinline__ void finish_h(Shared& shared, const Sums<N>& sums, const Unit& unit, const Multiplier& own,
                                         const Results& results) {
  const GatedSums<N> h(sums, unit, own);
  h.find_maxima(shared, own);
  meet();
  const int thread = threadIdx.x;
  if (thread < N) {
    int largest = 0;
#pragma unroll
    for (int rows = 0; rows < ROW_GROUPS; rows++) largest = max(largest, (int)shared.maxima[rows][thread]);
    const float scale = fp8_scale(bits_to_float((u32)largest << 16));
    shared.inverses[thread] = inverse_power(scale);
    if (thread < unit.count) results.h_scales[(i64)(unit.first + thread) * TILES2 + unit.strip] = scale;
  }
  meet();
  h.round(shared, own);
  meet();
  for (int i = thread; i < unit.count * 8; i += MULTIPLY_THREADS) {
    const int pair = i / 8, piece = i % 8;
    u8* const to = results.h + (i64)(unit.first + pair) * INNER + unit.strip * TILE_COLUMNS + piece * 16;
    *(uint4*)to = *(const uint4*)(shared.rounded[piece] + pair * 16);
  }
}

// A strip of the result's columns for each pair, which the sum over the choices of its row will take.
template <int N>
__device__ __forceinline__ void finish_parts(const Sums<N>& sums, const Unit& unit, const Multiplier& own,
                                             const Results& results) {
  float* const column = results.parts + unit.strip * STRIP_COLUMNS + own.first_panel * PANEL_ROWS +
                        own.row_group * 16 + own.lane / 4;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int pair = GatedSums<N>::first_pair(own, i / 2) + i % 2;
    if (pair >= unit.count) continue;
    float* const to = column + (i64)unit.pairs[pair] * HIDDEN;
#pragma unroll
    for (int panel = 0; panel < OWN_PANELS; panel++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        to[panel * PANEL_ROWS + half * 8] = sums.of[panel][i / 2 * 4 + i % 2 + half * 2] * sums.factors[panel][half];
  }
}

// The 128 bytes that hold `from` need not reach memory: nobody reads them before they are written again.
__device__ __forceinline__ void discard_line(const float* from) {
#ifndef DSV4C_EMULATE
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(from) : "memory");
#endif
}

// The block's share of a strip of the result, once all parts of the strip are there. A warp has rows by 128 columns,
// four a lane, each the sum of its parts in the order of the choices.
__device__ __forceinline__ void sum_strip(int strip, int places, int rows, const Results& results,
                                          const Counters& counters) {
  static_assert(OUT_STRIDE % 4 == 0);
  // As many at once as registers allow: the time is that of the ways to L2.
  constexpr int MOST = (WARPGROUPS == 2 ? 24 : 12) / CHOICES, AT_ONCE = MOST > 0 ? MOST : 1;
  constexpr int ALL_WARPS = SMS * MULTIPLY_WARPS;
  const int warp = blockIdx.x * MULTIPLY_WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int halves = min(STRIP_COLUMNS, HIDDEN - strip * STRIP_COLUMNS) / 128, items = rows * halves;
  if (lane == 0) wait_for_count(counters.strip(strip), places);
  __syncwarp();
#pragma unroll 1
  for (int first = warp; first < items; first += AT_ONCE * ALL_WARPS) {
    const float* from[AT_ONCE];
    float* to[AT_ONCE];
    float4 parts[AT_ONCE][CHOICES];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      // Beyond the last the last again, so that no load depends on anything.
      const int item = min(first + i * ALL_WARPS, items - 1);
      const int row = item / halves, column = strip * STRIP_COLUMNS + item % halves * 128 + lane * 4;
      from[i] = results.parts + (i64)row * CHOICES * HIDDEN + column;
      to[i] = results.out + (i64)row * OUT_STRIDE + column;
      // Not through L1, which other blocks do not write through.
#pragma unroll
      for (int choice = 0; choice < CHOICES; choice++)
        parts[i][choice] = __ldcg((const float4*)(from[i] + choice * HIDDEN));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i * ALL_WARPS >= items) break;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int choice = 0; choice < CHOICES; choice++) {
        const float4& part = parts[i][choice];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      *(float4*)to[i] = sum;
      if (lane % 8 == 0)
#pragma unroll
        for (int choice = 0; choice < CHOICES; choice++) discard_line(from[i] + choice * HIDDEN);
    }
  }
}
