// Every warp function on values that its lanes can tell apart; out[test][thread]. Also faults that must be found.
#include "block.cuh"
#include "dtype.cuh"
#include "step.cuh"

extern "C" __global__ void warp_functions(const int* x, int* out, const StepHeader*) {
  const int thread = threadIdx.x, threads = blockDim.x;
  const int value = x[thread];
  int test = 0;
  const auto put = [&](int result) { out[test++ * threads + thread] = result; };
  put(__shfl_sync(FULL_MASK, value, 5));
  put(__shfl_sync(FULL_MASK, value, 11, 8));
  put(__shfl_xor_sync(FULL_MASK, value, 3));
  put(__shfl_down_sync(FULL_MASK, value, 4));
  put(__shfl_down_sync(FULL_MASK, value, 3, 8));
  put(__shfl_up_sync(FULL_MASK, value, 4));
  put((int)__ballot_sync(FULL_MASK, value & 1));
  put(__any_sync(FULL_MASK, value == x[0]));
  put(__all_sync(FULL_MASK, value >= 0));
  put(__reduce_max_sync(FULL_MASK, value));
  put(__reduce_add_sync(FULL_MASK, value));
  // The halves of a warp on their own.
  if (thread % 32 < 16) put(__shfl_xor_sync(0x0000FFFFu, value, 1));
  else put(__shfl_xor_sync(0xFFFF0000u, value, 2));
  put(__syncthreads_count(value & 1));
}

extern "C" __global__ void sums(const float* x, float* out, const StepHeader*) {
  __shared__ float partial[BLOCK_WARPS];
  const float sum = block_sum<BLOCK_WARPS>(x[threadIdx.x], partial);
  const float largest = block_max<BLOCK_WARPS>(x[threadIdx.x], partial);
  out[threadIdx.x] = sum;
  out[blockDim.x + threadIdx.x] = largest;
}

// Shared memory holds what was written in this block, else NaN; dynamic memory likewise.
extern "C" __global__ void unwritten(const float* x, float* out, const StepHeader*) {
  __shared__ float values[4];
  DYNAMIC_SHARED(raw);
  float* dynamic = reinterpret_cast<float*>(raw);
  if (blockIdx.x == 0 && threadIdx.x == 0) values[1] = dynamic[1] = x[0];
  __syncthreads();
  if (threadIdx.x < 4) out[blockIdx.x * 8 + threadIdx.x] = values[threadIdx.x];
  else if (threadIdx.x < 8) out[blockIdx.x * 8 + threadIdx.x] = dynamic[threadIdx.x - 4];
}

extern "C" __global__ void barrier_not_reached_by_all(const int*, int*, const StepHeader*) {
  if (threadIdx.x < 40) __syncthreads();
}

extern "C" __global__ void different_barriers(const int* x, int*, const StepHeader*) {
  if (x[threadIdx.x] & 1) __syncthreads();
  else __syncthreads();
}

extern "C" __global__ void shuffle_of_half_a_warp(const int* x, int* out, const StepHeader*) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(FULL_MASK, x[threadIdx.x], 1);
}

extern "C" __global__ void different_shuffles(const int* x, int* out, const StepHeader*) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(FULL_MASK, x[threadIdx.x], 1);
  else out[threadIdx.x] = __shfl_sync(FULL_MASK, x[threadIdx.x], 1);
}

extern "C" __global__ void null_pointer(const int* x, int* out, const StepHeader*) {
  int* nowhere = reinterpret_cast<int*>((u64)(x[0] - x[0]));
  if (threadIdx.x == 33) *nowhere = 1;
}

extern "C" __global__ void misaligned(const int* x, int* out, const StepHeader*) {
  const int4 values = *reinterpret_cast<const int4*>(x + 1);
  if (threadIdx.x == 0) out[0] = values.x;
}

extern "C" __global__ void past_dynamic_shared(const int*, int*, const StepHeader*) {
  DYNAMIC_SHARED(raw);
  if (threadIdx.x == 0) raw[32] = 1;
}

// Neighbours read what the lane before wrote, without a barrier.
extern "C" __global__ void race(const int* x, int* out, const StepHeader*) {
  __shared__ int values[64];
  values[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = values[(threadIdx.x + 63) % 64];
}
