// What Hopper adds, as functions: barriers in shared memory that count bytes, bulk copies that arrive at them, e4m3
// products of a warpgroup, waiting for the launch before, and counters between blocks.
#pragma once

#include "dtype.cuh"
#include "shared_address.cuh"

// A place in a ring of Size slots that barriers guard, and the parity of the phase that fills it there.
template <int Size>
struct Ring {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == Size) slot = 0, parity ^= 1;
  }
};

#ifdef DSV4C_EMULATE
#include "hopper_emulated.h"
inline void global_fence() {}
inline u32 fetch_add(u32* counter, u32 value) { return fetch_add_acq_rel(counter, value); }
inline void barrier_arrive(SharedAddress barrier) { barrier_arrive((u64*)barrier); }
inline void barrier_wait(SharedAddress barrier, u32 parity) { barrier_wait((u64*)barrier, parity); }
#else

// ---- barriers in shared memory (mbarrier): a phase ends when all arrivals and all announced bytes have come ----

__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// By the thread that initialised them, before the others use them (behind a barrier of the block).
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) { barrier_arrive(shared_address(barrier)); }
// Arrives and announces bytes of copies.
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Until the phase of that parity has ended; a fresh barrier is in phase 0, so that parity 1 does not wait.
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  barrier_wait(shared_address(barrier), parity);
}
// The calling thread's earlier cp_async copies arrive when they are done; it counts as one of the arrivals.
__device__ __forceinline__ void cp_async_arrive(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- bulk copies from global to shared memory: addresses and bytes are multiples of 16 ----

// For data that is read once a launch: L2 gives its lines up first.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// Ordinary stores to shared memory of this thread, before products or bulk copies that read or overwrite them.
__device__ __forceinline__ void shared_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same of global memory: behind ordinary stores, and again by whoever has been told of them, before the bulk copies
// that read what was stored.
__device__ __forceinline__ void global_proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- some threads of a block (ids 1 to 15; whole warps) ----
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts as this warp's part of such a barrier without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- counters in global memory, between blocks ----
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(u32* counter, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
// Earlier accesses of this thread, and what it knows of others', before later ones: on both sides of a `fetch_add`.
__device__ __forceinline__ void global_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// The value before; by itself it orders nothing.
__device__ __forceinline__ u32 fetch_add(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ u32 fetch_add_acq_rel(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}
// Between two looks at a counter.
__device__ __forceinline__ void pause(int nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

// ---- the launch before (programmatic dependent launch) ----

// The dependent launch may start once every block has called this or returned.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the launches before are complete and their writes visible; returns at once where nothing is depended on.
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- products of a warpgroup: four warps, the first a multiple of four; all 128 threads take part ----
//
// D [64, N] (+)= A [64, 32] B [32, N] of e4m3, float32 sums. With warp w of the group, g = lane / 4, t = lane % 4:
//   A, registers: a[0] row 16w+g, columns 4t..4t+3; a[1] row 16w+g+8; a[2] row 16w+g, columns 16+4t..; a[3] row 16w+g+8
//   D: d[4j], d[4j+1] row 16w+g, columns 8j+2t, 8j+2t+1; d[4j+2], d[4j+3] row 16w+g+8
//   B in shared memory, not swizzled: core matrices of 8 columns (n) x 16 bytes (k), 128 contiguous bytes each;
//   `k_stride` bytes between the two core matrices along k, `n_stride` bytes between those of 8 columns and the next.

// A description of B.
__device__ __forceinline__ u64 product_operand(const void* shared, int k_stride, int n_stride) {
  return (u64)(shared_address(shared) >> 4 & 0x3FFF) | (u64)(k_stride >> 4) << 16 | (u64)(n_stride >> 4) << 32;
}
// Before the first product and after registers of operands were written.
__device__ __forceinline__ void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most Pending committed groups are under way.
template <int Pending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler from moving accesses to a register across it.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)::"memory"); }

#endif
