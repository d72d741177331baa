// What becomes of the sums of a unit (experts_units.cuh): products of gate and up on their way to h, and parts of the
// result, which are added up a strip at a time.
#pragma once

#include "experts_units.cuh"
#include "quantize.cuh"

// Sums of a warp's row group by N pairs: element 4 j + i is of pair 8 j + 2 (lane % 4) + i % 2 and row slot
// lane / 4 + i / 2 * 8. They are yet to be multiplied by the factors of the slots.
template <int N>
struct Sums {
  float of[N / 2];
  float factors[2];
};

// All warps that multiply.
__device__ __forceinline__ void meet() { named_barrier(1, MULTIPLY_THREADS); }

// The first of the two pairs of eight that are a lane's.
__device__ __forceinline__ int first_pair(int lane, int eight) { return eight * 8 + lane % 4 * 2; }

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
  u32 of[N / 8];  // two neighbouring pairs, of each eight

  template <typename Unit>
  __device__ __forceinline__ GatedSums(const Sums<N>& sums, const Unit& unit, int lane) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int pair = first_pair(lane, j);
      const float2 weights = *(const float2*)&unit.weights[pair], factors = unit.factors(pair);
      const float* const sum = sums.of + 4 * j;
      of[j] = pack_bf16(
          gate_up(sum[0] * (sums.factors[0] * factors.x), sum[2] * (sums.factors[1] * factors.x)) * weights.x,
          gate_up(sum[1] * (sums.factors[0] * factors.y), sum[3] * (sums.factors[1] * factors.y)) * weights.y);
    }
  }

  __device__ __forceinline__ float low(int j) const { return bits_to_float(of[j] << 16); }
  __device__ __forceinline__ float high(int j) const { return bits_to_float(of[j] & 0xFFFF0000u); }

  // The largest magnitudes of each pair among the rows of a row group.
  __device__ __forceinline__ void find_maxima(u16 (&maxima)[TILE], int lane) const {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      u32 largest = of[j] & 0x7FFF7FFFu;
#pragma unroll
      for (int lanes = 4; lanes < LANES; lanes *= 2)
        largest = larger_halves(largest, __shfl_xor_sync(FULL_MASK, largest, lanes));
      if (lane < 4) *(u32*)&maxima[first_pair(lane, j)] = largest;
    }
  }
};

// The e4m3 scale of a pair's 128 columns of h.
__device__ __forceinline__ float scale_of(const u16 (&maxima)[ROW_GROUPS][TILE], int pair) {
  int largest = 0;
#pragma unroll
  for (int rows = 0; rows < ROW_GROUPS; rows++) largest = max(largest, (int)maxima[rows][pair]);
  return fp8_scale(bits_to_float((u32)largest << 16));
}

// A strip of the result's columns for each pair, which the sum over the choices of its row will take. `row` is the
// strip's, the first of the lane's two; `factor` remains of the inputs.
template <int N>
__device__ __forceinline__ void finish_parts(const Sums<N>& sums, const UnitBase& unit, int row, int lane, float factor,
                                             float* parts) {
  const float factors[2] = {sums.factors[0] * factor, sums.factors[1] * factor};
  float* const column = parts + unit.strip * STRIP_COLUMNS + row;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int pair = first_pair(lane, i / 2) + i % 2;
    if (pair >= unit.count) continue;
    const float* const of_pair = sums.of + (i / 2 * 4 + i % 2);
    *(float2*)(column + (i64)unit.pairs[pair] * HIDDEN) = {of_pair[0] * factors[0], of_pair[2] * factors[1]};
  }
}

// The 128 bytes that hold `from` need not reach memory: nobody reads them before they are written again.
__device__ __forceinline__ void discard_line(const float* from) {
#ifndef DSV4C_EMULATE
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(from) : "memory");
#endif
}

// The block's share of a strip of the result, once all parts of the strip are there: `done` counts their units. A warp
// has rows by 128 columns, four a lane, each the sum of its parts in the order of the choices.
__device__ __forceinline__ void sum_strip(int strip, int rows, const u32* done, int units, const float* parts,
                                          float* out) {
  static_assert(OUT_STRIDE % 4 == 0);
  // As many at once as registers allow: the time is that of the ways to L2.
  constexpr int MOST = 12 / CHOICES, AT_ONCE = MOST > 0 ? MOST : 1;
  constexpr int ALL_WARPS = SMS * MULTIPLY_WARPS;
  const int warp = blockIdx.x * MULTIPLY_WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int halves = min(STRIP_COLUMNS, HIDDEN - strip * STRIP_COLUMNS) / 128, items = rows * halves;
  if (lane == 0) wait_for_count(done, units);
  __syncwarp();
#pragma unroll 1
  for (int first = warp; first < items; first += AT_ONCE * ALL_WARPS) {
    const float* from[AT_ONCE];
    float* to[AT_ONCE];
    float4 values[AT_ONCE][CHOICES];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      // Beyond the last the last again, so that no load depends on anything.
      const int item = min(first + i * ALL_WARPS, items - 1);
      const int row = item / halves, column = strip * STRIP_COLUMNS + item % halves * 128 + lane * 4;
      from[i] = parts + (i64)row * CHOICES * HIDDEN + column;
      to[i] = out + (i64)row * OUT_STRIDE + column;
      // Not through L1, which other blocks do not write through.
#pragma unroll
      for (int choice = 0; choice < CHOICES; choice++)
        values[i][choice] = __ldcg((const float4*)(from[i] + choice * HIDDEN));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i * ALL_WARPS >= items) break;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int choice = 0; choice < CHOICES; choice++) {
        const float4& part = values[i][choice];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      *(float4*)to[i] = sum;
      if (lane % 8 == 0)
#pragma unroll
        for (int choice = 0; choice < CHOICES; choice++) discard_line(from[i] + choice * HIDDEN);
    }
  }
}

// The units that a block draws, one after the other, and between them its share of the sums. `compute` takes a unit and
// its width, as a Width.
template <int N>
struct Width {};

template <typename Shared, typename Compute>
__device__ __forceinline__ void compute_units(Shared& shared, int rows, int all_places, const u32* strips_done,
                                              const float* parts, float* out, Compute& compute) {
  Ring<UNITS> units;
  int summed = 0;
  while (true) {
    barrier_wait(&shared.unit_full[units.slot], units.parity);
    const auto& unit = shared.units[units.slot];
    for (; summed < unit.sums_end; summed++) sum_strip(summed, rows, strips_done + summed, all_places, parts, out);
    if (unit.kind == END) return;
#define COMPUTE_IF(N) \
  if (N <= TILE && unit.width == N) compute(unit, Width<N <= TILE ? N : TILE>());
    FOR_EACH_WIDTH(COMPUTE_IF)
#undef COMPUTE_IF
    __syncwarp();
    if (threadIdx.x % LANES == 0) barrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
  }
}
