// Barriers in shared memory, bulk copies and named barriers; and faults that must be found.
#include "async.cuh"
#include "block.cuh"
#include "hopper.cuh"
#include "step.cuh"

constexpr int TILE = 32;  // floats
constexpr int STAGES = 2;
constexpr int TILE_BYTES = TILE * 4;

// Tiles of shared memory, then the barriers.
__device__ __forceinline__ u64* begin(unsigned char* shared, int barriers, int arrivals) {
  u64* const first = reinterpret_cast<u64*>(shared + STAGES * TILE_BYTES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < barriers; i++) barrier_init(first + i, arrivals);
    barrier_init_fence();
  }
  __syncthreads();
  return first;
}

// A producer (the last warp) and a warp that consumes a ring of tiles: out = 2 x. PRODUCER_WAITS 0: it overwrites what
// has not been read.
extern "C" __global__ void ring(const float* x, float* out, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  const int tid = threadIdx.x, consumers = blockDim.x - LANES;
  float* const tiles = reinterpret_cast<float*>(shared);
  u64* const full = reinterpret_cast<u64*>(shared + STAGES * TILE_BYTES);
  u64* const empty = full + STAGES;
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, consumers / LANES);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const u64 policy = evict_first_policy();
  for (int tile = 0; tile < TILES; tile++) {
    const int stage = tile % STAGES;
    const u32 parity = tile / STAGES & 1;
    if (tid >= consumers) {
      if (tid == consumers) {
        if (PRODUCER_WAITS) barrier_wait(empty + stage, parity ^ 1);
        barrier_expect(full + stage, TILE_BYTES);
        bulk_copy(tiles + stage * TILE, x + tile * TILE, TILE_BYTES, full + stage, policy);
      }
    } else {
      barrier_wait(full + stage, parity);
      out[tile * TILE + tid] = 2 * tiles[stage * TILE + tid % TILE];
      __syncwarp();
      if (tid % LANES == 0) barrier_arrive(empty + stage);
    }
  }
}

// Every thread's own copies arrive; nobody waits for them otherwise. out: before, then after.
extern "C" __global__ void copies_arrive(const float* x, float* out, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, blockDim.x);
  float* const tile = reinterpret_cast<float*>(shared);
  const int tid = threadIdx.x;
  if (tid < TILE / 4) cp_async_16(tile + 4 * tid, x + 4 * tid);
  out[tid] = tile[tid];
  cp_async_arrive(full);
  barrier_wait(full, 0);
  out[TILE + tid] = tile[tid];
}

// Two halves of the block meet on their own, then both. out: who came before each thread in its half, then in all.
extern "C" __global__ void named(const int*, int* out, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  int* const counts = reinterpret_cast<int*>(shared);
  const int tid = threadIdx.x, half = tid / (blockDim.x / 2);
  if (tid == 0) counts[0] = counts[1] = counts[2] = 0;
  __syncthreads();
  atomicAdd(counts + half, 1);
  named_barrier(1 + half, blockDim.x / 2);
  out[tid] = counts[half];
  atomicAdd(counts + 2, 1);
  if (half) named_barrier(3, blockDim.x);
  else named_barrier(3, blockDim.x);
  out[blockDim.x + tid] = counts[2];
}

// ---- faults ----

__device__ void too_few_arrivals(const float*) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 3);
  if (threadIdx.x < 2) barrier_arrive(full);
  else barrier_wait(full, 0);
}

__device__ void too_many_arrivals(const float*) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) barrier_expect(full, 16);
  __syncthreads();
  if (threadIdx.x == 1) barrier_arrive(full);
}

__device__ void bytes_never_come(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) {
    barrier_expect(full, TILE_BYTES);
    bulk_copy(shared, x, TILE_BYTES / 2, full, evict_first_policy());
  }
  barrier_wait(full, 0);
}

__device__ void bytes_not_waited_for(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x) return;
  barrier_expect(full, TILE_BYTES);
  bulk_copy(shared, x, TILE_BYTES, full, evict_first_policy());
}

__device__ void bytes_not_announced(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 2);
  if (threadIdx.x == 0) {
    bulk_copy(shared, x, TILE_BYTES, full, evict_first_policy());
    barrier_arrive(full);
  }
  barrier_wait(full, 0);
}

__device__ void not_initialised(const float*) {
  DYNAMIC_SHARED(shared);
  barrier_wait(reinterpret_cast<u64*>(shared), 0);
}

__device__ void overwritten(const float*) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 5) *full = 0;
  __syncthreads();
  barrier_wait(full, 0);
}

__device__ void without_fence(const float*) {
  DYNAMIC_SHARED(shared);
  u64* const full = reinterpret_cast<u64*>(shared);
  if (threadIdx.x == 0) barrier_init(full, 1);
  __syncthreads();
  if (threadIdx.x == 1) barrier_arrive(full);
}

// The second phase ends while a thread that waits for the first has not run.
__device__ void missed_phase(const float*) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) barrier_wait(full, 0);
  if (threadIdx.x == LANES) {
    barrier_arrive(full);
    barrier_arrive(full);
  }
}

__device__ void copy_misaligned(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) bulk_copy(shared, x + 1, 16, full, evict_first_policy());
}

__device__ void copy_of_20_bytes(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) bulk_copy(shared, x, 20, full, evict_first_policy());
}

__device__ void copy_past_the_end(const float* x) {
  DYNAMIC_SHARED(shared);
  u64* const full = begin(shared, 1, 1);
  if (threadIdx.x == 0) bulk_copy(shared + STAGES * TILE_BYTES, x, TILE_BYTES, full, evict_first_policy());
}

__device__ void named_of_other_size(const float*) {
  named_barrier(1, threadIdx.x < LANES ? LANES * 2 : LANES);
}

__device__ void named_too_few(const float*) {
  if (threadIdx.x < LANES) named_barrier(4, LANES * 2);
}

__device__ void named_half_a_warp(const float*) {
  if (threadIdx.x % LANES < LANES / 2) named_barrier(1, LANES);
}

__device__ void named_zero(const float*) { named_barrier(0, LANES); }

// In the order of the test.
extern "C" __global__ void fault(const float* x, const int* number, const StepHeader*) {
  constexpr void (*FAULTS[])(const float*) = {
    too_few_arrivals, too_many_arrivals, bytes_never_come, bytes_not_waited_for, bytes_not_announced,
    not_initialised, overwritten, without_fence, missed_phase, copy_misaligned,
    copy_of_20_bytes, copy_past_the_end, named_of_other_size, named_too_few, named_half_a_warp,
    named_zero,
  };
  FAULTS[*number](x);
}
