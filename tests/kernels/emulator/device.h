// The emulator as kernels see it (emulate.h): declarations, since every kernel's compilation reads them. What they do is
// compiled once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulate {

constexpr unsigned LANES = 32;
constexpr size_t SLOT_BYTES = 64;  // largest value of a lane in an exchange
constexpr unsigned long long NO_POLICY = 0xE0, EVICT_FIRST = 0xE1;  // of bulk copies

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// What runs now.
extern unsigned current;  // thread of the block
extern Index3 thread_index, block_index, block_size, grid_size;
extern unsigned char* dynamic_shared;

inline unsigned lane() { return current % LANES; }

// ---- errors ----

// The first fault is the launch's error.
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Ends the launch from within a thread.
[[noreturn]] void stop();

// ---- lanes of a warp ----

typedef unsigned char Slot[SLOT_BYTES];

// Puts a lane's value into its slot. True for the last of the mask, which then calls `end_meeting`; the others come back
// behind that.
bool meet(unsigned mask, const void* value, size_t bytes, const char* what, int line, Slot*& slots);
void end_meeting(unsigned mask);

// Publishes `value` to the lanes of `mask` and returns the slots of all, once all have come. The last one calls
// `finish` on them, which may put results there. The slots stay until the second exchange after this one.
template <typename T, typename F>
const Slot* exchange(unsigned mask, const T& value, const char* what, int line, F finish) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  Slot* slots;
  if (meet(mask, &value, sizeof(T), what, line, slots)) {
    finish(slots);
    end_meeting(mask);
  }
  return slots;
}

template <typename T>
const Slot* exchange(unsigned mask, const T& value, const char* what, int line) {
  return exchange(mask, value, what, line, [](Slot*) {});
}

template <typename T>
T slot(const Slot* slots, unsigned lane) {
  T value;
  __builtin_memcpy(&value, slots[lane], sizeof(T));
  return value;
}

// ---- threads of a block ----

// __syncthreads, and the number of threads that voted yes.
unsigned block_barrier(bool vote, const char* what, int line);
// bar.sync: `threads` of the block, whole warps, at one of 15 barriers.
void named_barrier(int id, int threads, int line);

// ---- counters in global memory (counters.cc) ----

void pause(const char* what, int line);
unsigned load_acquire(const unsigned* counter, int line);
unsigned fetch_add(unsigned* counter, unsigned value);

// ---- copies to shared memory, barriers in it (shared_barriers.cc) ----

void start_copy(void* to, const void* from, unsigned bytes);
void commit_copies();  // ends the open group
void wait_for_copies(unsigned pending);
void barrier_init(unsigned long long* place, int arrivals, int line);
void barrier_init_fence();
void barrier_arrive(unsigned long long* place, int line);
void barrier_expect(unsigned long long* place, int bytes, int line);
void barrier_wait(unsigned long long* place, unsigned parity, int line);
void bulk_copy(void* to, const void* from, int bytes, unsigned long long* place, unsigned long long policy, int line);
void cp_async_arrive(unsigned long long* place, int line);

// ---- products of a warpgroup (warpgroup.cc) ----

void shared_proxy_fence();
unsigned long long product_operand(const void* shared, int k_stride, int n_stride, int line);
void product_begin();
// Sums d [64, columns] of a warpgroup (+)= A [64, k] B [k, columns], of 32 bytes along k; operands as hopper.cuh says.
void warpgroup_product(float* d, unsigned columns, unsigned element_bytes, const unsigned (&a)[4],
                       unsigned long long b, bool accumulate, int line);
void product_commit();
void product_wait(unsigned pending);

// ---- a launch (grid.cc) ----

extern void (*body)();      // of a thread
extern char message[4096];  // of the error

// Runs a grid; the error's text, or null. `order` 1 runs blocks, warps and lanes last to first: a kernel whose result
// depends on that lacks a barrier.
const char* launch(const unsigned grid[3], unsigned block, size_t shared_bytes, int order);

}  // namespace emulate
