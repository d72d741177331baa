// Runs one block after the other: its threads are fibers, and a warp runs until all its lanes wait at a barrier of the
// block. Lanes meet in `exchange`, which every warp function is made of. A meeting that some thread never joins is an
// error with the line it waits at.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fiber.h"

// The linker's names for the bounds of the section that static shared memory is in; absent where a kernel has none.
extern "C" unsigned char __start_dsv4c_shared[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_dsv4c_shared[] __attribute__((weak, visibility("hidden")));

namespace emulate {

constexpr unsigned LANES = 32;
// Not a power of two: the tops of the stacks, all that is used of them, would share their place in the host's caches.
constexpr size_t STACK_BYTES = (64 << 10) + 9 * 64;
constexpr size_t SLOT_BYTES = 64;  // largest value of a lane in an exchange
constexpr size_t GUARD_BYTES = 256;
constexpr unsigned char POISON = 0xFF;  // NaN in every float type
constexpr size_t STATIC_SHARED_LIMIT = 48 << 10;
constexpr size_t SHARED_LIMIT = 227 << 10;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

enum class State { READY, AT_BLOCK, AT_WARP, EXITED };

// Copies between global and shared memory that a thread has started and not waited for.
struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  unsigned bytes;
};

struct Thread {
  Context context;
  State state = State::READY;
  int line = 0;
  const char* what = "";
  unsigned mask = 0;
  std::vector<std::vector<AsyncCopy>> groups;
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

// What one launch runs on.
inline Context scheduler;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline unsigned current = 0;
inline bool reversed = false;
inline Index3 thread_index, block_index, block_size, grid_size;
inline unsigned char* dynamic_shared = nullptr;
inline size_t dynamic_shared_bytes = 0;
inline bool failed = false;
inline char message[512];
inline void (*body)() = nullptr;
inline unsigned block_votes[2] = {0, 0};  // of __syncthreads_count and its kin, by parity
inline unsigned block_meetings = 0;
inline sigjmp_buf recover;

inline void report(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline void report(const char* format, ...) {
  if (failed) return;
  failed = true;
  const int used =
      std::snprintf(message, sizeof message, "block (%u, %u, %u): ", block_index.x, block_index.y, block_index.z);
  va_list args;
  va_start(args, format);
  std::vsnprintf(message + used, sizeof message - used, format, args);
  va_end(args);
}

inline void leave() { switch_context(threads[current].context, scheduler); }

// Ends the launch from within a thread.
[[noreturn]] inline void stop() {
  for (;;) leave();
}

inline void run_thread() {
  body();
  threads[current].state = State::EXITED;
  stop();
}

inline bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

inline unsigned lane() { return current % LANES; }
inline Warp& warp() { return warps[current / LANES]; }

typedef unsigned char Slot[SLOT_BYTES];

// Publishes `value` to the lanes of `mask` and returns the slots of all, once all have come. The last one calls
// `finish` on them, which may put results there. The slots stay until the second exchange after this one.
template <typename T, typename F>
const Slot* exchange(unsigned mask, const T& value, const char* what, int line, F finish) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  Thread& self = threads[current];
  const unsigned bit = 1u << lane();
  if (!(mask & bit)) {
    report("%s at line %d: thread %u is not in its own mask 0x%08X", what, line, current, mask);
    stop();
  }
  const unsigned first = current / LANES * LANES;
  Meeting& meeting = warp().meetings[__builtin_ctz(mask)];
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
  const unsigned parity = block_meetings & 1;
  block_votes[parity] += vote;
  Thread& self = threads[current];
  self.state = State::AT_BLOCK;
  self.what = what;
  self.line = line;
  leave();
  return block_votes[parity];
}

inline void start_copy(void* to, const void* from, unsigned bytes) {
  Thread& self = threads[current];
  if (self.groups.empty()) self.groups.emplace_back();
  self.groups.back().push_back({to, from, bytes});
}

// Ends the open group of copies.
inline void commit_copies() {
  Thread& self = threads[current];
  if (self.groups.empty()) self.groups.emplace_back();
  self.groups.emplace_back();
}

// A copy happens as late as it may: whoever reads before waiting finds what was there.
inline void wait_for_copies(unsigned pending) {
  auto& groups = threads[current].groups;
  if (groups.empty()) return;
  const size_t committed = groups.size() - 1;
  const size_t done = committed > pending ? committed - pending : 0;
  for (size_t group = 0; group < done; group++)
    for (const AsyncCopy& copy : groups[group]) {
      if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
      else std::memset(copy.to, 0, copy.bytes);
    }
  groups.erase(groups.begin(), groups.begin() + done);
}

inline void run_warp(unsigned warp) {
  const unsigned first = warp * LANES;
  const unsigned last = first + LANES < threads.size() ? first + LANES : (unsigned)threads.size();
  for (bool progress = true; progress && !failed;) {
    progress = false;
    for (unsigned step = 0; step < last - first && !failed; step++) {
      const unsigned index = reversed ? last - 1 - step : first + step;
      if (threads[index].state != State::READY) continue;
      progress = true;
      current = index;
      thread_index.x = index;
      switch_context(scheduler, threads[index].context);
    }
  }
}

// All threads are at one barrier (true), all have left (false), or that never comes about (an error).
inline bool all_at_barrier() {
  const Thread& first = threads[0];
  for (unsigned index = 0; index < threads.size(); index++) {
    const Thread& thread = threads[index];
    if (thread.state == State::AT_WARP) {
      report("thread %u waits for ever in line %d: %s with mask 0x%08X, which not all of its lanes reach", index,
             thread.line, thread.what, thread.mask);
      return false;
    }
  }
  for (unsigned index = 1; index < threads.size(); index++) {
    const Thread& thread = threads[index];
    if (thread.state == first.state &&
        (first.state == State::EXITED || (thread.line == first.line && same(thread.what, first.what))))
      continue;
    const bool exited = thread.state == State::EXITED;
    if (exited || first.state == State::EXITED) {
      const Thread& waiting = exited ? first : thread;
      report("barrier divergence: thread %u waits at %s in line %d, thread %u has returned", exited ? 0 : index,
             waiting.what, waiting.line, exited ? index : 0);
    } else {
      report("barrier divergence: thread 0 waits at %s in line %d, thread %u at %s in line %d", first.what, first.line,
             index, thread.what, thread.line);
    }
    return false;
  }
  return first.state == State::AT_BLOCK;
}

inline void check_guard() {
  for (size_t byte = 0; byte < GUARD_BYTES; byte++)
    if (dynamic_shared[dynamic_shared_bytes + byte] != POISON) {
      report("byte %zu of dynamic shared memory was written; it has %zu", dynamic_shared_bytes + byte,
             dynamic_shared_bytes);
      return;
    }
}

inline void run_block(unsigned char* stacks) {
  const size_t static_bytes = __stop_dsv4c_shared - __start_dsv4c_shared;
  if (static_bytes) std::memset(__start_dsv4c_shared, POISON, static_bytes);
  std::memset(dynamic_shared, POISON, dynamic_shared_bytes + GUARD_BYTES);
  for (Warp& warp : warps)
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
  block_votes[0] = block_votes[1] = 0;
  for (unsigned index = 0; index < threads.size(); index++) {
    Thread& thread = threads[index];
    thread.state = State::READY;
    thread.groups.clear();
    thread.context.prepare(stacks + index * STACK_BYTES, STACK_BYTES, run_thread);
  }
  const unsigned count = (unsigned)warps.size();
  for (;;) {
    for (unsigned step = 0; step < count && !failed; step++) run_warp(reversed ? count - 1 - step : step);
    if (failed || !all_at_barrier()) break;
    block_meetings++;
    block_votes[block_meetings & 1] = 0;
    for (Thread& thread : threads) thread.state = State::READY;
  }
  if (!failed) check_guard();
}

inline void on_signal(int number) { siglongjmp(recover, number); }

inline const char* signal_meaning(int number) {
  switch (number) {
    case SIGILL: return "an access to a misaligned address";
    case SIGFPE: return "an integer division by zero";
    default: return "an access to an illegal address (outside the buffers, or of a vector that is not aligned)";
  }
}

// Memory faults of a kernel come back as errors: on their own stack, since a fiber's may be what overflowed.
struct SignalHandlers {
  static constexpr int NUMBERS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction before[4];
  stack_t stack_before;
  std::vector<unsigned char> stack = std::vector<unsigned char>(64 << 10);

  SignalHandlers() {
    stack_t alternative = {};
    alternative.ss_sp = stack.data();
    alternative.ss_size = stack.size();
    sigaltstack(&alternative, &stack_before);
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(NUMBERS[i], &action, &before[i]);
  }
  ~SignalHandlers() {
    for (int i = 0; i < 4; i++) sigaction(NUMBERS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

inline void run_blocks(unsigned char* stacks) {
  const unsigned blocks = grid_size.x * grid_size.y * grid_size.z;
  for (unsigned step = 0; step < blocks && !failed; step++) {
    const unsigned block = reversed ? blocks - 1 - step : step;
    block_index = {block % grid_size.x, block / grid_size.x % grid_size.y, block / grid_size.x / grid_size.y};
    run_block(stacks);
  }
}

// Runs a grid; the error's text, or null. `order` 1 runs blocks, warps and lanes last to first: a kernel whose result
// depends on that lacks a barrier.
inline const char* launch(const unsigned grid[3], unsigned block, size_t shared_bytes, int order) {
  failed = false;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block, 1, 1};
  block_index = {};
  reversed = order != 0;
  const size_t static_bytes = __stop_dsv4c_shared - __start_dsv4c_shared;
  if (block == 0 || block > 1024) report("%u threads a block; 1 to 1024 are possible", block);
  if (static_bytes > STATIC_SHARED_LIMIT) report("%zu bytes of static shared memory, more than 48 KiB", static_bytes);
  if (static_bytes + shared_bytes > SHARED_LIMIT)
    report("%zu bytes of shared memory, more than 227 KiB", static_bytes + shared_bytes);
  if (failed) return message;

  threads.assign(block, Thread());
  warps.assign((block + LANES - 1) / LANES, Warp());
  std::vector<unsigned char> shared(shared_bytes + GUARD_BYTES + 1024);
  dynamic_shared =
      reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(shared.data()) + 1023) & ~uintptr_t{1023});
  dynamic_shared_bytes = shared_bytes;
  constexpr int PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* stacks = mmap(nullptr, block * STACK_BYTES, PROT_READ | PROT_WRITE, PRIVATE, -1, 0);
  if (stacks == MAP_FAILED) {
    report("no memory for the stacks of %u threads", block);
    return message;
  }
  {
    SignalHandlers handlers;
    const int number = sigsetjmp(recover, 1);
    if (number == 0) run_blocks(static_cast<unsigned char*>(stacks));
    else report("thread %u: %s", current, signal_meaning(number));
  }
  munmap(stacks, block * STACK_BYTES);
  return failed ? message : nullptr;
}

}  // namespace emulate
