#include "block.h"

#include <cstdarg>
#include <cstdio>

namespace emulate {

unsigned current = 0;
Index3 thread_index, block_index, block_size, grid_size;
unsigned char* dynamic_shared = nullptr;
char message[4096];
void (*body)() = nullptr;

static void append(const char* format, va_list args) {
  const int added = std::vsnprintf(message + message_bytes, sizeof message - message_bytes, format, args);
  message_bytes += added;
  if (message_bytes >= sizeof message) message_bytes = sizeof message - 1;
}
void append(const char* format, ...) {
  va_list args;
  va_start(args, format);
  append(format, args);
  va_end(args);
}

void report(const char* format, ...) {
  if (failed) return;
  failed = true;
  message_bytes = 0;
  append("block (%u, %u, %u): ", block_index.x, block_index.y, block_index.z);
  va_list args;
  va_start(args, format);
  append(format, args);
  va_end(args);
}

[[noreturn]] void stop() {
  for (;;) leave();
}

bool meet(unsigned mask, const void* value, size_t bytes, const char* what, int line, Slot*& slots) {
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
  slots = meeting.slots[meeting.count & 1];
  if (!meeting.arrived && mask != ~0u) std::memset(slots, POISON, sizeof meeting.slots[0]);
  std::memcpy(slots[lane()], value, bytes);
  meeting.arrived |= bit;
  self.what = what;
  self.line = line;
  self.mask = mask;
  if (meeting.arrived == mask) return true;
  self.state = State::AT_WARP;
  leave();
  return false;
}

void end_meeting(unsigned mask) {
  std::vector<Thread>& threads = running->threads;
  const unsigned first = current / LANES * LANES;
  Meeting& meeting = running->warps[current / LANES].meetings[__builtin_ctz(mask)];
  meeting.arrived = 0;
  meeting.count++;
  for (unsigned other = mask; other; other &= other - 1) {
    const unsigned index = first + __builtin_ctz(other);
    if (index < threads.size()) threads[index].state = State::READY;
  }
}

unsigned block_barrier(bool vote, const char* what, int line) {
  const unsigned parity = running->meetings & 1;
  running->votes[parity] += vote;
  wait_at(State::AT_BLOCK, what, line);
  return running->votes[parity];
}

void named_barrier(int id, int threads, int line) {
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
