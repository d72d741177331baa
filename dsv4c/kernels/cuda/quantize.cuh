// Rounding through e4m3 and e2m1 with one power-of-two scale for a group of channels (spec 2.9).
//
// The scales are in dtype.cuh. A division by one is exact, and so is the product with its inverse.
#pragma once

#include "dtype.cuh"

// 1 / power, for a power of two from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_power(float power) {
  return bits_to_float(0x7F000000u - float_to_bits(power));
}

// The value that x has after a store as e4m3 under `scale`; `inverse` is that of the scale.
__device__ __forceinline__ float through_e4m3(float x, float scale, float inverse) {
  return to_float(to_e4m3(fminf(fmaxf(x * inverse, -448.0f), 448.0f))) * scale;
}

// As e2m1.
__device__ __forceinline__ float through_e2m1(float x, float scale, float inverse) {
  return round_e2m1(fminf(fmaxf(x * inverse, -6.0f), 6.0f)) * scale;
}
