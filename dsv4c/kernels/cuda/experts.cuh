// What the launches of moe_ffn hand on. With P = T * CHOICES pairs of a row and an expert:
//   experts_route     pairs expert by expert; tiles of up to TILE pairs of one expert; x rounded and prepared
//   experts_gate_up   h[P] = routing weight * swiglu(w1 x, w3 x), rounded
//   experts_down      parts[P] = w2 h, float32
//   experts_sum       out[T] = sum of a row's parts in the order of its choices
// h has a row for each place in the list of pairs, parts for each pair, CHOICES * row + choice.
#pragma once

#include "dtype.cuh"

// Pairs of one expert, consecutive in the list.
struct Tile {
  int expert, first, pairs, unused;
};

// v rounded to e4m3 under `scale`, as a value of T.
template <typename T>
__device__ __forceinline__ T rounded_fp8(float v, float scale) {
  const float code = fminf(fmaxf(v / scale, -448.0f), 448.0f);
  return from_float<T>(to_float(to_e4m3(code)) * scale);
}

// With limit L: silu(min(gate, L)) * clamp(up, -L, L).
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.0f + expf(-gate)) * up;
}
