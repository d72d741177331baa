// The finishing warps of experts_stream.cu: sums over the warpgroups, h, the parts of the output and their sums.
#pragma once

#include "experts_stream.cuh"

// Sums of a row group and eight pairs of the place: element i is of pair 2 (lane % 4) + i % 2 of these and row slot
// lane / 4 + i / 2 * 8.
typedef float SumsOfEight[4];

// Over the four warpgroups, in their order.
__device__ __forceinline__ void collect(const Shared& shared, int buffer, int row_group, int eight, int lane,
                                        SumsOfEight& sums) {
  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int group = 0; group < WARPGROUPS; group++) {
    const float4 part = shared.sums[buffer][group * 4 + row_group][eight][lane];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  constexpr float TIMES = FP8 ? 1.0f : FP4_DECODED_TIMES;
  sums[0] = sum.x * TIMES, sums[1] = sum.y * TIMES, sums[2] = sum.z * TIMES, sums[3] = sum.w * TIMES;
}

// Two neighbouring parts of a row's choice.
__device__ __forceinline__ float2 load_parts(const float* from) {
#ifdef DSV4C_EMULATE
  return *(const float2*)from;
#else
  float2 values;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "l"(from) : "memory");
  return values;
#endif
}

// A row's sum over its choices, of the 64 columns that this panel is of: by the warp that finished the last of their
// parts, in the order of the choices.
__device__ __forceinline__ void sum_choices(int row, int panel, int lane, const float* parts, float* out) {
  const int column = panel * PANEL_ROWS + 2 * lane;
  float2 values[CHOICES];
#pragma unroll
  for (int choice = 0; choice < CHOICES; choice++)
    values[choice] = load_parts(parts + (i64)(row * CHOICES + choice) * HIDDEN + column);
  float2 sum = {0, 0};
#pragma unroll
  for (int choice = 0; choice < CHOICES; choice++) sum.x += values[choice].x, sum.y += values[choice].y;
  *(float2*)(out + (i64)row * OUT_STRIDE + column) = sum;
}

// The first of the two pairs of an eight that a lane has sums of.
__device__ __forceinline__ int first_pair(int eight, int lane) { return eight * 8 + lane % 4 * 2; }

// Two row groups of the first projection: their h, 16 columns from `column` on.
__device__ __forceinline__ void finish_product(const Place& place, int column, int eight, int lane,
                                               const SumsOfEight (&sums)[2], const float (&weights)[2], bf16* h) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bf16 products[2];
#pragma unroll
    for (int j = 0; j < 2; j++) products[j] = to_bf16(gated(sums[j][i], sums[j][2 + i]) * weights[i]);
    bf16* const row = h + (i64)(place.first + first_pair(eight, lane) + i) * INNER + column + lane / 4;
    if (first_pair(eight, lane) + i < place.count) row[0] = products[0], row[8] = products[1];
  }
}

// A row group of the second projection: the parts of the rows of its pairs.
__device__ __forceinline__ void finish_parts(const Place& place, const PairNumber* pairs, int row, int eight, int lane,
                                             const SumsOfEight& sums, float* parts) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (first_pair(eight, lane) + i >= place.count) continue;
    float* const to = parts + (i64)pairs[place.first + first_pair(eight, lane) + i] * HIDDEN + row + lane / 4 * 2;
    *(float2*)to = {sums[i], sums[2 + i]};
  }
}

// Counts the parts of a panel; who finds them complete for a row adds them up.
__device__ __forceinline__ void count_parts(const Place& place, const PairNumber* pairs, int panel, int lane,
                                            const float* parts, u32* rows_done, float* out) {
  __syncwarp();
  global_fence();
  const int row = lane < place.count ? pairs[place.first + lane] / CHOICES : 0;
  bool last = false;
  if (lane < place.count) last = fetch_add(&rows_done[row * PANELS2 + panel], 1) == CHOICES - 1;
  u32 left = __ballot_sync(0xFFFFFFFFu, last);
  if (left) global_fence();
  for (; left; left &= left - 1)
    sum_choices(__shfl_sync(0xFFFFFFFFu, row, __ffs(left) - 1), panel, lane, parts, out);
}

__device__ __forceinline__ void finish(Shared& shared, const Place* places, const float* pair_weights,
                                       bf16* h, float* parts, u32* counters, float* out) {
  const Stretch& own = shared.own;
  const int lane = threadIdx.x % 32, warp = (int)threadIdx.x / 32 - FIRST_FINISH_WARP;
  const int panels1 = count(own.first), panels = panels1 + count(own.second);
  int next = warp;  // counted through the block's panels of both projections
  u32 parity = 0;
  float weights[EIGHTS][2];
  int of_place = -1;
#pragma unroll 1
  for (; next < panels; next += FINISH_WARPS, parity ^= 1) {
    const bool first = next < panels1;
    const int panel = first ? panel_of(own.first, next) : panel_of(own.second, next - panels1);
    const int number = panel / (first ? PANELS1 : PANELS2), own_panel = panel % (first ? PANELS1 : PANELS2);
    const Place& place = places[number];
    if (first && number != of_place) {
      of_place = number;
#pragma unroll
      for (int i = 0; i < 2 * EIGHTS; i++) {
        const int pair = first_pair(i / 2, lane) + i % 2;
        weights[i / 2][i % 2] = pair < place.count ? pair_weights[shared.pairs[place.first + pair]] : 0.0f;
      }
    }
    barrier_wait(&shared.computed[warp], parity);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      if (eight && eight * 8 >= place.count) break;
#pragma unroll
      for (int row_group = 0; row_group < ROW_GROUPS; row_group += 2) {
        SumsOfEight sums[2];
        collect(shared, warp, row_group, eight, lane, sums[0]);
        collect(shared, warp, row_group + 1, eight, lane, sums[1]);
        if (first) {
          finish_product(place, own_panel * 32 + row_group * 8, eight, lane, sums, weights[eight], h);
        } else {
          finish_parts(place, shared.pairs, own_panel * 64 + row_group * 16, eight, lane, sums[0], parts);
          finish_parts(place, shared.pairs, own_panel * 64 + row_group * 16 + 16, eight, lane, sums[1], parts);
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.finished[warp]);
    if (!first) count_parts(place, shared.pairs, own_panel, lane, parts, counters + MOST_PLACES, out);
    else if (lane == 0) add_release(&counters[&place - shared.places], 1);
  }
}
