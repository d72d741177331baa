// The functions of dsv4c/kernels/cuda/hopper.cuh, which includes this file in their place. Default arguments are the
// caller's line, for errors.
#pragma once

// ---- barriers in shared memory ----
inline void barrier_init(u64* barrier, int arrivals, int line = __builtin_LINE()) {
  emulate::barrier_init(barrier, arrivals, line);
}
inline void barrier_init_fence() { emulate::barrier_init_fence(); }
inline void barrier_arrive(u64* barrier, int line = __builtin_LINE()) { emulate::barrier_arrive(barrier, line); }
inline void barrier_expect(u64* barrier, int bytes, int line = __builtin_LINE()) {
  emulate::barrier_expect(barrier, bytes, line);
}
inline void barrier_wait(u64* barrier, u32 parity, int line = __builtin_LINE()) {
  emulate::barrier_wait(barrier, parity, line);
}
inline void cp_async_arrive(u64* barrier, int line = __builtin_LINE()) { emulate::cp_async_arrive(barrier, line); }

// ---- bulk copies ----
inline u64 evict_first_policy() { return emulate::EVICT_FIRST; }
inline void bulk_copy(void* shared, const void* global, int bytes, u64* barrier, u64 policy,
                      int line = __builtin_LINE()) {
  emulate::bulk_copy(shared, global, bytes, barrier, policy, line);
}
inline void bulk_copy(void* shared, const void* global, int bytes, u64* barrier, int line = __builtin_LINE()) {
  emulate::bulk_copy(shared, global, bytes, barrier, emulate::NO_POLICY, line);
}
inline void shared_proxy_fence() { emulate::shared_proxy_fence(); }
inline void global_proxy_fence() {}

// ---- some threads of a block ----
inline void named_barrier(int id, int threads, int line = __builtin_LINE()) {
  emulate::named_barrier(id, threads, line);
}

// ---- counters ----
inline u32 load_acquire(const u32* counter, int line = __builtin_LINE()) {
  return emulate::load_acquire(counter, line);
}
inline void add_release(u32* counter, u32 value) { emulate::fetch_add(counter, value); }
inline u32 fetch_add_acq_rel(u32* counter, u32 value) { return emulate::fetch_add(counter, value); }
inline void pause(int, int line = __builtin_LINE()) { emulate::pause("pause", line); }

// ---- the launch before: it has ended ----
inline void launch_dependents() {}
inline void wait_for_launch_before() {}

// ---- products of a warpgroup ----
inline u64 product_operand(const void* shared, int k_stride, int n_stride, int line = __builtin_LINE()) {
  return emulate::product_operand(shared, k_stride, n_stride, line);
}
inline void product_begin() { emulate::product_begin(); }
// D [64, columns] (+)= A [64, k] B [k, columns], of 32 e4m3 or 16 f16 along k; the registers of D hold NaNs until the
// threads have waited.
inline void emulated_warpgroup_product(float* d, int columns, const u32 (&a)[4], u64 b, bool accumulate,
                                       int line = __builtin_LINE()) {
  emulate::warpgroup_product(d, columns, 1, a, b, accumulate, line);
}
inline void emulated_f16_product(float* d, int columns, const u32 (&a)[4], u64 b, int line = __builtin_LINE()) {
  emulate::warpgroup_product(d, columns, 2, a, b, true, line);
}
inline void product_commit() { emulate::product_commit(); }
template <int Pending>
inline void product_wait() {
  emulate::product_wait(Pending);
}
inline void keep(float&) {}
