// What each block of experts_stream.cu does. dsv4c/graph/topology.py has the same rule, for drawing. Macros: HALVES.
#pragma once

#include "experts_packed.cuh"

constexpr int WARPGROUPS = 4;
constexpr int SLOTS1 = (TILES1 + WARPGROUPS - 1) / WARPGROUPS, SLOTS2 = (TILES2 + WARPGROUPS - 1) / WARPGROUPS;

// A run of panels, counted through those of all places.
struct Run {
  int begin, end;
  __device__ __forceinline__ int count() const { return end - begin; }
};

// What a block does, in this order: its panels of w13 of the first half of the places, of the second half, then of w2.
// So h of the first half is ready when it is wanted, and that of the second by the time the first is done.
struct Stretch {
  Run first[2], second[2];  // by halves
};

__device__ __forceinline__ int count(const Run (&halves)[2]) { return halves[0].count() + halves[1].count(); }
// Panel `index` of those of both halves.
__device__ __forceinline__ int panel_of(const Run (&halves)[2], int index) {
  const int half = halves[0].count();
  return index < half ? halves[0].begin + index : halves[1].begin + index - half;
}

__device__ __forceinline__ int share(int total, int index, int blocks) { return (int)((i64)total * index / blocks); }

// The slots before block `index` of `blocks` are its share of all: those of w13, then as many of w2 as are left. Where
// there is too little work to divide it so, there is no first half, or both projections are shared evenly.
__device__ __forceinline__ Stretch stretch_of(int places, int index, int blocks) {
  const int panels1 = places * PANELS1, panels2 = places * PANELS2, slots = panels1 * SLOTS1 + panels2 * SLOTS2;
  const int most1 = (panels1 + blocks - 1) / blocks, least2 = (slots / blocks - most1 * SLOTS1) / SLOTS2 - 1;
  const int half = places / 2;
  const bool halves = HALVES && panels1 / blocks >= (half * PANELS1 + blocks - 1) / blocks &&
                      least2 >= (half * PANELS2 + blocks - 1) / blocks;
  const int half1 = halves ? half * PANELS1 : 0, half2 = halves ? half * PANELS2 : 0;
  int ends[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int all1 = share(panels1, index + i, blocks);
    const int all2 = least2 >= 0 ? (share(slots, index + i, blocks) - all1 * SLOTS1) / SLOTS2
                                 : share(panels2, index + i, blocks);
    ends[i][0] = share(half1, index + i, blocks), ends[i][1] = half1 + all1 - ends[i][0];
    ends[i][2] = share(half2, index + i, blocks), ends[i][3] = half2 + all2 - ends[i][2];
  }
  return {{{ends[0][0], ends[1][0]}, {ends[0][1], ends[1][1]}}, {{ends[0][2], ends[1][2]}, {ends[0][3], ends[1][3]}}};
}
