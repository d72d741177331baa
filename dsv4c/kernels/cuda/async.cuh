// Copies from global to shared memory that run beside the thread (cp.async). A thread sees its own copies after
// cp_async_wait, those of other threads after a barrier behind that.
#pragma once

#include "dtype.cuh"
#include "shared_address.cuh"

// 16 bytes past the L1 cache, both addresses on a multiple of 16; zeros where not `valid` (the source is not read then,
// but must still be an address that could be).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
#ifdef DSV4C_EMULATE
  if ((u64)shared % 16 || (u64)global % 16) {
    emulate::report("thread %u: cp_async_16 with an address that is not aligned to 16 bytes", emulate::current);
    emulate::stop();
  }
  emulate::start_copy(shared, valid ? global : nullptr, 16);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// 8 bytes through the L1 cache, both addresses on a multiple of 8.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
#ifdef DSV4C_EMULATE
  if ((u64)shared % 8 || (u64)global % 8) {
    emulate::report("thread %u: cp_async_8 with an address that is not aligned to 8 bytes", emulate::current);
    emulate::stop();
  }
  emulate::start_copy(shared, global, 8);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#endif
}

// 4 bytes through the L1 cache, both addresses on a multiple of 4.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global) {
#ifdef DSV4C_EMULATE
  if ((u64)shared % 4 || (u64)global % 4) {
    emulate::report("thread %u: cp_async_4 with an address that is not aligned to 4 bytes", emulate::current);
    emulate::stop();
  }
  emulate::start_copy(shared, global, 4);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#endif
}

// The first `bytes` (0 to 16) of 16, then zeros.
__device__ __forceinline__ void cp_async_part(void* shared, const void* global, int bytes) {
#ifdef DSV4C_EMULATE
  if ((u64)shared % 16 || (u64)global % 16) {
    emulate::report("thread %u: cp_async_part with an address that is not aligned to 16 bytes", emulate::current);
    emulate::stop();
  }
  emulate::start_copy(shared, nullptr, 16);
  if (bytes) emulate::start_copy(shared, global, (unsigned)bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#ifdef DSV4C_EMULATE
  emulate::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most the Pending latest groups of this thread are under way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
#ifdef DSV4C_EMULATE
  emulate::wait_for_copies(Pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}
