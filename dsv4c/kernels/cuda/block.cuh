// What the threads of a block do together. Reductions have one order, so that a result is the same on every run.
#pragma once

// Dynamic shared memory under the name `name`, an array of unsigned char; once in a kernel.
#ifdef DSV4C_EMULATE
#define DYNAMIC_SHARED(name) unsigned char* const name = emulate::dynamic_shared
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

constexpr int LANES = 32;
constexpr unsigned FULL_MASK = 0xFFFFFFFFu;

// Sum over aligned parts of Span lanes, which all of them get; the same bits in each.
template <int Span = LANES>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = Span / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(FULL_MASK, value, lanes);
  return value;
}

template <int Span = LANES>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lanes = Span / 2; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, lanes));
  return value;
}

// Sum over a block of Warps whole warps, which every thread gets. `partial` is shared memory for Warps values; it is
// free again at the return.
template <int Warps>
__device__ __forceinline__ float block_sum(float value, float* partial) {
  value = warp_sum(value);
  if (Warps == 1) return value;
  if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = value;
  __syncthreads();
  float sum = partial[0];
#pragma unroll
  for (int warp = 1; warp < Warps; warp++) sum += partial[warp];
  __syncthreads();
  return sum;
}

template <int Warps>
__device__ __forceinline__ float block_max(float value, float* partial) {
  value = warp_max(value);
  if (Warps == 1) return value;
  if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = value;
  __syncthreads();
  float largest = partial[0];
#pragma unroll
  for (int warp = 1; warp < Warps; warp++) largest = fmaxf(largest, partial[warp]);
  __syncthreads();
  return largest;
}
