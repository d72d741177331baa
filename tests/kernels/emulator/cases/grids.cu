// Blocks that wait for one another by way of counters; and those that wait for ever.
#include "block.cuh"
#include "hopper.cuh"
#include "step.cuh"

// A chain through all blocks, WAYS times, first from the last to the first: each multiplies what the one before left by
// 3 and adds its input. Each also has shared memory of its own, of both kinds.
extern "C" __global__ void chain(const int* x, int* out, u32* counters, const StepHeader*) {
  __shared__ int kept[32];
  DYNAMIC_SHARED(raw);
  int* const dynamic = reinterpret_cast<int*>(raw);
  const int block = blockIdx.x, blocks = gridDim.x, tid = threadIdx.x;
  kept[tid] = dynamic[tid] = 1000 * block + tid;
  __syncthreads();
  for (int way = 0; way < WAYS; way++) {
    const int turn = way % 2 ? block : blocks - 1 - block;
    if (tid == 0)
      while (load_acquire(counters) < (u32)(way * blocks + turn)) pause(20);
    __syncthreads();
    if (tid == 0) out[0] = out[0] * 3 + x[block];
    if (kept[tid] != 1000 * block + tid || dynamic[tid] != 1000 * block + tid) out[1] = 1;
    __syncthreads();
    if (tid == 0) add_release(counters, 1);
  }
}

// The last block to come adds up what all have written. All threads look, none pauses.
extern "C" __global__ void last_adds_up(const int* x, int* out, u32* counters, const StepHeader*) {
  __shared__ u32 before;
  const int block = blockIdx.x, tid = threadIdx.x;
  if (tid == 0) {
    out[1 + block] = x[block];
    before = fetch_add_acq_rel(counters, 1);
  }
  __syncthreads();
  if (tid == 0 && before == gridDim.x - 1) {
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += out[1 + i];
    out[0] = sum;
    add_release(counters + 1, 1);
  }
  while (load_acquire(counters + 1) == 0) {
  }
  for (int i = 0; i < 5; i++) load_acquire(counters + 1);
  if (out[0] == 0) out[1] = -1;
}

// Looks at two counters by turns, and at memory that is no counter.
extern "C" __global__ void other_looks(const int*, int* out, u32* counters, const StepHeader*) {
  volatile int* const flag = out + 1;
  if (blockIdx.x == 1) {
    add_release(counters, 1);
    while (load_acquire(counters + 1) == 0) {
    }
    *flag = 7;
    return;
  }
  while (load_acquire(counters) == 0 || load_acquire(counters + 2) == 0)
    if (load_acquire(counters)) {
      add_release(counters + 1, 1);
      add_release(counters + 2, 1);
    }
  while (*flag != 7) __nanosleep(20);
  out[0] = 1;
}

extern "C" __global__ void waits_for_ever(const int*, int*, u32* counters, const StepHeader*) {
  if (threadIdx.x == 3) {
    if (blockIdx.x == 0) add_release(counters, 1);
    while (load_acquire(counters) < 2) pause(20);
  }
  __syncthreads();
}

// Copies what another block writes without waiting for it.
extern "C" __global__ void does_not_wait(const int* x, int* out, u32*, const StepHeader*) {
  const int block = blockIdx.x;
  out[block] = x[block];
  out[2 + block] = out[1 - block];
}
