// Eight consecutive channels at a time: 16 bytes of bf16. Rows whose addresses or width are no multiple of that go
// element by element.
#pragma once

#include "dtype.cuh"

constexpr int CHUNK = 8;

__device__ __forceinline__ void load_vector(const float* from, float (&x)[CHUNK]) {
  const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void load_vector(const bf16* from, float (&x)[CHUNK]) {
  const uint4 pairs = *reinterpret_cast<const uint4*>(from);
  const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = bits_to_float(words[i] << 16);
    x[2 * i + 1] = bits_to_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void store_vector(float* to, const float (&x)[CHUNK]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store_vector(bf16* to, const float (&x)[CHUNK]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = (u32)to_bf16(x[2 * i + 1]).bits << 16 | to_bf16(x[2 * i]).bits;
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Channels `first` to `first` + 7 of a row of Width; zeros behind its end.
template <bool Vector, int Width, typename T>
__device__ __forceinline__ void load_chunk(const T* row, int first, float (&x)[CHUNK]) {
  if constexpr (Vector) {
    if (first < Width) {
      load_vector(row + first, x);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNK; i++) x[i] = !Vector && first + i < Width ? to_float(row[first + i]) : 0.0f;
}

template <bool Vector, int Width, typename T>
__device__ __forceinline__ void store_chunk(T* row, int first, const float (&x)[CHUNK]) {
  if constexpr (Vector) {
    if (first < Width) store_vector(row + first, x);
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
      if (first + i < Width) row[first + i] = from_float<T>(x[i]);
  }
}
