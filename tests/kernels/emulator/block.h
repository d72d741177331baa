// A block of threads: they are fibers, and a warp runs until all its lanes wait. Lanes meet in `exchange`, which every
// warp function is made of. A meeting that some thread never joins is an error with the line it waits at (grid.h).
#pragma once

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "fiber.h"

namespace emulate {

constexpr unsigned LANES = 32;
constexpr unsigned GROUP = 4 * LANES;  // threads of a warpgroup
constexpr unsigned NAMED_BARRIERS = 16;
constexpr size_t SLOT_BYTES = 64;  // largest value of a lane in an exchange
constexpr size_t GUARD_BYTES = 256;
constexpr unsigned char POISON = 0xFF;  // NaN in every float type

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

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

// An mbarrier (shared_barriers.h). Its eight bytes of shared memory hold a mark, by which it is found.
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

// Products of four warps (warpgroup.h).
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
inline unsigned current = 0;  // thread of it
inline Index3 thread_index, block_index, block_size, grid_size;
inline unsigned char* dynamic_shared = nullptr;
inline size_t dynamic_shared_bytes = 0;
inline bool reversed = false;
inline bool failed = false;
inline char message[4096];
inline size_t message_bytes = 0;
inline void (*body)() = nullptr;

inline void append(const char* format, va_list args) {
  const int added = std::vsnprintf(message + message_bytes, sizeof message - message_bytes, format, args);
  message_bytes += added;
  if (message_bytes >= sizeof message) message_bytes = sizeof message - 1;
}
inline void append(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline void append(const char* format, ...) {
  va_list args;
  va_start(args, format);
  append(format, args);
  va_end(args);
}

// The first fault is the launch's error.
inline void report(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline void report(const char* format, ...) {
  if (failed) return;
  failed = true;
  message_bytes = 0;
  append("block (%u, %u, %u): ", block_index.x, block_index.y, block_index.z);
  va_list args;
  va_start(args, format);
  append(format, args);
  va_end(args);
}

inline Thread& self() { return running->threads[current]; }

inline void leave() { switch_context(self().context, scheduler); }

// Ends the launch from within a thread.
[[noreturn]] inline void stop() {
  for (;;) leave();
}

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

inline unsigned lane() { return current % LANES; }

typedef unsigned char Slot[SLOT_BYTES];

// Publishes `value` to the lanes of `mask` and returns the slots of all, once all have come. The last one calls
// `finish` on them, which may put results there. The slots stay until the second exchange after this one.
template <typename T, typename F>
const Slot* exchange(unsigned mask, const T& value, const char* what, int line, F finish) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  std::vector<Thread>& threads = running->threads;
  Thread& self = threads[current];
  const unsigned bit = 1u << lane();
  if (!(mask & bit)) {
    report("%s at line %d: thread %u is not in its own mask 0x%08X", what, line, current, mask);
    stop();
  }
  const unsigned first = current / LANES * LANES;
  Meeting& meeting = running->warps[current / LANES].meetings[__builtin_ctz(mask)];
  if (meeting.arrived) {
    const unsigned other = first + __builtin_ctz(meeting.arrived);
    const Thread& peer = threads[other];
    if (peer.line != line || peer.mask != mask || !same(peer.what, what)) {
      report("lanes of a warp diverge: thread %u is at %s in line %d with mask 0x%08X, thread %u at %s in line %d with "
             "mask 0x%08X", current, what, line, mask, other, peer.what, peer.line, peer.mask);
      stop();
    }
  }
  auto* slots = meeting.slots[meeting.count & 1];
  if (!meeting.arrived && mask != ~0u) std::memset(slots, POISON, sizeof meeting.slots[0]);
  std::memcpy(slots[lane()], &value, sizeof(T));
  meeting.arrived |= bit;
  self.what = what;
  self.line = line;
  self.mask = mask;
  if (meeting.arrived == mask) {
    finish(slots);
    meeting.arrived = 0;
    meeting.count++;
    for (unsigned other = mask; other; other &= other - 1) {
      const unsigned index = first + __builtin_ctz(other);
      if (index < threads.size()) threads[index].state = State::READY;
    }
  } else {
    self.state = State::AT_WARP;
    leave();
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
  std::memcpy(&value, slots[lane], sizeof(T));
  return value;
}

// __syncthreads, and the number of threads that voted yes.
inline unsigned block_barrier(bool vote, const char* what, int line) {
  const unsigned parity = running->meetings & 1;
  running->votes[parity] += vote;
  wait_at(State::AT_BLOCK, what, line);
  return running->votes[parity];
}

// bar.sync: `threads` of the block, whole warps, at one of 15 barriers.
inline void named_barrier(int id, int threads, int line) {
  if (id < 1 || id >= (int)NAMED_BARRIERS || threads < (int)LANES || threads % LANES ||
      threads > (int)running->threads.size()) {
    report("thread %u: named_barrier in line %d of id %d and %d threads; ids are 1 to 15, threads whole warps of the "
           "block's %zu", current, line, id, threads, running->threads.size());
    stop();
  }
  NamedBarrier& barrier = running->named[id];
  if (barrier.waiting.empty()) barrier.threads = threads;
  if (barrier.threads != (unsigned)threads) {
    const unsigned other = barrier.waiting[0];
    report("barrier divergence: thread %u is at named_barrier %d in line %d with %d threads, thread %u in line %d with "
           "%u", current, id, line, threads, other, running->threads[other].line, barrier.threads);
    stop();
  }
  barrier.waiting.push_back(current);
  if (barrier.waiting.size() < barrier.threads)
    return wait_at(State::AT_NAMED_BARRIER, "named_barrier", line, &barrier);
  unsigned lanes[LANES] = {};  // of each warp
  for (const unsigned index : barrier.waiting) lanes[index / LANES]++;
  for (unsigned warp = 0; warp < running->warps.size(); warp++) {
    if (lanes[warp] == 0 || lanes[warp] == LANES) continue;
    report("named_barrier %d in line %d: only %u lanes of warp %u take part", id, line, lanes[warp], warp);
    stop();
  }
  barrier.waiting.pop_back();
  make_ready(barrier.waiting);
}

}  // namespace emulate
