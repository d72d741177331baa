// The rotary embedding of one channel pair (spec 2.5).
#pragma once

#include "dtype.cuh"

struct Rotation {
  float cos;
  float sin;
};

// Of a pair that turns by `frequency` a position. The angle is rounded to float32 as in the reference body; whole turns
// are taken off in double precision, so that positions of a million are as exact as the first ones.
__device__ __forceinline__ Rotation rotation_at(int position, float frequency) {
  const double turns = (double)((float)position * frequency) * 0.15915494309189535;  // 1 / (2 pi)
  Rotation at;
  sincospif(2.0f * (float)(turns - rint(turns)), &at.sin, &at.cos);
  return at;
}

__device__ __forceinline__ void rotate(float& even, float& odd, Rotation at) {
  const float turned = even * at.cos - odd * at.sin;
  odd = odd * at.cos + even * at.sin;
  even = turned;
}

// By the conjugate.
__device__ __forceinline__ void rotate_back(float& even, float& odd, Rotation at) {
  rotate(even, odd, Rotation{at.cos, -at.sin});
}
