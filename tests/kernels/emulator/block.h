// A block of threads: they are fibers, and a warp runs until all its lanes wait. Lanes meet in `exchange`, which every
// warp function is made of. A meeting that some thread never joins is an error with the line it waits at (grid.cc).
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "device.h"
#include "fiber.h"

namespace emulate {

constexpr unsigned GROUP = 4 * LANES;  // threads of a warpgroup
constexpr unsigned NAMED_BARRIERS = 16;
constexpr size_t GUARD_BYTES = 256;
constexpr unsigned char POISON = 0xFF;  // NaN in every float type

enum class State { READY, AT_BLOCK, AT_WARP, AT_BARRIER, AT_NAMED_BARRIER, AT_PRODUCT, AT_COUNTER, EXITED };

// Copies between global and shared memory that a thread has started and not waited for.
struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  unsigned bytes;    // 0: done
};

struct Product;

struct Thread {
  Context context;
  State state = State::READY;
  // Where it waits, for what.
  int line = 0;
  const char* what = "";
  unsigned mask = 0;
  const void* object = nullptr;
  unsigned parity = 0;
  std::vector<std::vector<AsyncCopy>> groups;
  std::vector<std::vector<std::shared_ptr<Product>>> product_groups;
  bool products_begun = false;
  // The counter it looked at last, the value then, and looks since it let others run.
  const void* polled = nullptr;
  unsigned polled_value = 0, polls = 0;
};

// A meeting of lanes is kept by the lowest lane of its mask, so that disjoint parts of a warp meet on their own.
struct Meeting {
  unsigned arrived = 0;
  unsigned count = 0;  // meetings so far: its parity picks the slots
  alignas(16) unsigned char slots[2][LANES][SLOT_BYTES];
};

struct Warp {
  Meeting meetings[LANES];
};

// An mbarrier (shared_barriers.cc). Its eight bytes of shared memory hold a mark, by which it is found.
struct SharedBarrier {
  unsigned long long* place = nullptr;
  unsigned expected = 0, missing = 0;  // arrivals of a phase, those still to come
  long long bytes = 0;                 // announced, not yet copied
  unsigned phase = 0;
  unsigned owner = 0;  // who initialised it
  bool fenced = false;
  std::vector<unsigned> waiting;
  unsigned woken = 0;  // threads that waited for the last phase and have not run since
};

// What arrives at a barrier some time after a thread asked for it: a bulk copy, or the end of a thread's own copies.
struct Landing {
  unsigned thread;
  int line;
  unsigned barrier;
  void* to;          // null: the copies of `groups`
  const void* from;
  unsigned bytes;
  std::vector<AsyncCopy> copies;
};

struct NamedBarrier {
  unsigned threads = 0;
  std::vector<unsigned> waiting;
};

// Products of four warps (warpgroup.cc).
struct ProductOperands {
  float* d;
  unsigned a[4];
};
struct ProductCall {
  unsigned long long b;
  unsigned columns;
  unsigned element_bytes;
  bool accumulate;
  int line;

  bool operator==(const ProductCall& other) const {
    return b == other.b && columns == other.columns && element_bytes == other.element_bytes &&
           accumulate == other.accumulate && line == other.line;
  }
};
struct Accumulator;
struct Warpgroup {
  std::vector<unsigned> waiting;  // in the product that all are to join
  ProductCall call;
  ProductOperands operands[GROUP];
  std::deque<std::shared_ptr<Product>> queue;  // not yet calculated
  std::vector<std::shared_ptr<Accumulator>> accumulators;
};

// Shared memory as products and bulk copies see it: without ordinary stores that no fence has followed. Kept for the
// bytes that products have read, and before the first product for all.
struct AsyncView {
  std::vector<unsigned char> bytes;
  std::vector<std::pair<size_t, size_t>> read;  // from, to
};

struct Block {
  Index3 index;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned char* stacks = nullptr;
  size_t stacks_bytes = 0;
  std::vector<unsigned char> storage;
  unsigned char* shared = nullptr;           // dynamic
  std::vector<unsigned char> static_shared;  // while another block runs
  unsigned votes[2] = {0, 0};                // of __syncthreads_count and its kin, by parity
  unsigned meetings = 0;
  bool woken = false;  // threads of another warp became ready
  std::deque<SharedBarrier> barriers;
  std::deque<Landing> landings;
  NamedBarrier named[NAMED_BARRIERS];
  std::vector<Warpgroup> warpgroups;
  AsyncView view;

  ~Block() {
    if (stacks) munmap(stacks, stacks_bytes);
  }
};

// What runs now.
inline Context scheduler;
inline Block* running = nullptr;
inline size_t dynamic_shared_bytes = 0;
inline bool reversed = false;
inline bool failed = false;
inline size_t message_bytes = 0;
void append(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline Thread& self() { return running->threads[current]; }

inline void leave() { switch_context(self().context, scheduler); }

inline void stop_if_failed() {
  if (failed) stop();
}

// Lets others run until one of them makes this thread ready.
inline void wait_at(State state, const char* what, int line, const void* object = nullptr) {
  Thread& thread = self();
  thread.state = state;
  thread.what = what;
  thread.line = line;
  thread.object = object;
  leave();
}

// Threads of other warps may be among them.
inline void make_ready(std::vector<unsigned>& waiting) {
  for (const unsigned index : waiting) running->threads[index].state = State::READY;
  waiting.clear();
  running->woken = true;
}

inline void run_thread() {
  body();
  self().state = State::EXITED;
  stop();
}

inline bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

}  // namespace emulate
