// Runs a grid: one block after the other, each as far as it comes by itself. One that looks at a counter that another
// block is to change stays alive, with its own shared memory, and goes on after the others have run; so blocks that
// wait for one another all live at once, and the others never do.
#include <setjmp.h>
#include <signal.h>

#include "counters.h"
#include "shared_barriers.h"
#include "warpgroup.h"

namespace emulate {

namespace {

// Not a power of two: the tops of the stacks, all that is used of them, would share their place in the host's caches.
constexpr size_t STACK_BYTES = (64 << 10) + 9 * 64;
constexpr size_t STATIC_SHARED_LIMIT = 48 << 10;
constexpr size_t SHARED_LIMIT = 227 << 10;
constexpr unsigned IDLE_ROUNDS = 10000;  // of all blocks without a change of a counter: they wait for ever

std::vector<std::unique_ptr<Block>> waiting_blocks, spare_blocks;
sigjmp_buf recover;

size_t static_shared_bytes() { return __stop_dsv4c_shared - __start_dsv4c_shared; }

void run_warp(unsigned warp) {
  std::vector<Thread>& threads = running->threads;
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

// ---- what nobody can go on with ----

void describe(const Thread& thread) {
  switch (thread.state) {
    case State::AT_BARRIER: {
      const auto& barrier = *static_cast<const SharedBarrier*>(thread.object);
      append("wait at barrier_wait in line %d for phase %u of the barrier at byte %zu of shared memory, which lacks %u "
             "of %u arrivals and %lld bytes", thread.line, barrier.phase, shared_byte(barrier.place), barrier.missing,
             barrier.expected, barrier.bytes);
      break;
    }
    case State::AT_NAMED_BARRIER: {
      const auto& barrier = *static_cast<const NamedBarrier*>(thread.object);
      append("wait at named_barrier %td in line %d, where %zu of %u threads are", &barrier - running->named,
             thread.line, barrier.waiting.size(), barrier.threads);
      break;
    }
    case State::AT_PRODUCT:
      append("wait at a product in line %d, where %zu of %u threads are", thread.line,
             static_cast<const Warpgroup*>(thread.object)->waiting.size(), GROUP);
      break;
    case State::AT_WARP: append("wait at %s in line %d with mask 0x%08X", thread.what, thread.line, thread.mask); break;
    case State::AT_COUNTER:
      append("wait at %s in line %d", thread.what, thread.line);
      if (thread.object) append(" of a counter that is %u", *static_cast<const unsigned*>(thread.object));
      break;
    case State::EXITED: append("have returned"); break;
    default: append("wait at %s in line %d", thread.what, thread.line);
  }
}

void describe_threads() {
  const std::vector<Thread>& threads = running->threads;
  const char* separator = " ";
  for (size_t first = 0, next; first < threads.size(); first = next) {
    const Thread& thread = threads[first];
    const bool exited = thread.state == State::EXITED;
    for (next = first + 1; next < threads.size(); next++) {
      const Thread& other = threads[next];
      if (other.state != thread.state) break;
      if (exited) continue;
      if (other.line != thread.line || other.object != thread.object || !same(other.what, thread.what)) break;
    }
    append("%sthreads %zu to %zu ", separator, first, next - 1);
    describe(thread);
    separator = "; ";
  }
}

// ---- one block ----

bool any_thread(State state) {
  for (const Thread& thread : running->threads)
    if (thread.state == state) return true;
  return false;
}

bool all_at_barrier() {
  const Thread& first = running->threads[0];
  for (const Thread& thread : running->threads)
    if (thread.state != State::AT_BLOCK || thread.line != first.line || !same(thread.what, first.what)) return false;
  return true;
}

// Why threads that only their own block could wake wait for ever.
void report_stuck() {
  const std::vector<Thread>& threads = running->threads;
  const Thread& first = threads[0];
  if (any_thread(State::AT_BARRIER) || any_thread(State::AT_NAMED_BARRIER) || any_thread(State::AT_PRODUCT)) {
    report("nothing can go on:");
    return describe_threads();
  }
  for (unsigned index = 0; index < threads.size(); index++) {
    const Thread& thread = threads[index];
    if (thread.state == State::AT_WARP)
      return report("thread %u waits for ever in line %d: %s with mask 0x%08X, which not all of its lanes reach", index,
                    thread.line, thread.what, thread.mask);
  }
  for (unsigned index = 1; index < threads.size(); index++) {
    const Thread& thread = threads[index];
    if (thread.state == first.state && thread.line == first.line && same(thread.what, first.what)) continue;
    const bool exited = thread.state == State::EXITED;
    if (exited && first.state == State::EXITED) continue;
    if (exited || first.state == State::EXITED) {
      const Thread& waiting = exited ? first : thread;
      return report("barrier divergence: thread %u waits at %s in line %d, thread %u has returned", exited ? 0 : index,
                    waiting.what, waiting.line, exited ? index : 0);
    }
    return report("barrier divergence: thread 0 waits at %s in line %d, thread %u at %s in line %d", first.what,
                  first.line, index, thread.what, thread.line);
  }
}

void check_guard() {
  for (size_t byte = 0; byte < GUARD_BYTES; byte++)
    if (dynamic_shared[dynamic_shared_bytes + byte] != POISON) {
      report("byte %zu of dynamic shared memory was written; it has %zu", dynamic_shared_bytes + byte,
             dynamic_shared_bytes);
      return;
    }
}

bool all_returned() {
  for (const Thread& thread : running->threads)
    if (thread.state != State::EXITED) return false;
  return true;
}

// As far as the block comes; whether it has ended.
bool run_block() {
  const unsigned count = (unsigned)running->warps.size();
  for (;;) {
    running->woken = false;
    for (unsigned step = 0; step < count && !failed; step++) run_warp(reversed ? count - 1 - step : step);
    if (failed) return true;
    if (running->woken) continue;
    if (all_at_barrier()) {
      running->meetings++;
      running->votes[running->meetings & 1] = 0;
      for (Thread& thread : running->threads) thread.state = State::READY;
      continue;
    }
    if (all_returned()) break;
    if (!running->landings.empty()) {
      Landing landing = std::move(running->landings.front());
      running->landings.pop_front();
      land(landing);
      continue;
    }
    if (any_thread(State::AT_COUNTER)) return false;
    report_stuck();
    return true;
  }
  check_barriers();
  check_products();
  check_guard();
  return true;
}

// ---- blocks that wait for one another ----

void enter(Block& block) {
  running = &block;
  block_index = block.index;
  dynamic_shared = block.shared;
  if (!block.static_shared.empty())
    std::memcpy(__start_dsv4c_shared, block.static_shared.data(), block.static_shared.size());
}

void put_aside(Block& block) { block.static_shared.assign(__start_dsv4c_shared, __stop_dsv4c_shared); }

// Null if there is no memory for it.
std::unique_ptr<Block> make_block() {
  if (!spare_blocks.empty()) {
    auto block = std::move(spare_blocks.back());
    spare_blocks.pop_back();
    return block;
  }
  constexpr int PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const unsigned threads = block_size.x;
  void* stacks = mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE, PRIVATE, -1, 0);
  if (stacks == MAP_FAILED) {
    report("no memory for the stacks of %u threads", threads);
    return nullptr;
  }
  auto block = std::make_unique<Block>();
  block->stacks = static_cast<unsigned char*>(stacks);
  block->stacks_bytes = threads * STACK_BYTES;
  block->threads.resize(threads);
  block->warps.resize((threads + LANES - 1) / LANES);
  block->storage.resize(dynamic_shared_bytes + GUARD_BYTES + 1024);
  block->shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block->storage.data()) + 1023) &
                                                   ~uintptr_t{1023});
  return block;
}

void begin(Block& block) {
  block.static_shared.clear();
  enter(block);
  if (static_shared_bytes()) std::memset(__start_dsv4c_shared, POISON, static_shared_bytes());
  std::memset(dynamic_shared, POISON, dynamic_shared_bytes + GUARD_BYTES);
  for (Warp& warp : block.warps)
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
  block.votes[0] = block.votes[1] = 0;
  block.barriers.clear();
  block.warpgroups.assign(block.threads.size() / GROUP, Warpgroup());
  block.view = AsyncView();
  for (unsigned index = 0; index < block.threads.size(); index++) {
    Thread& thread = block.threads[index];
    thread.state = State::READY;
    thread.groups.clear();
    thread.product_groups.clear();
    thread.products_begun = false;
    thread.polled = nullptr;
    thread.polls = 0;
    thread.context.prepare(block.stacks + index * STACK_BYTES, STACK_BYTES, run_thread);
  }
}

void run_all_waiting() {
  std::vector<std::unique_ptr<Block>> blocks;
  blocks.swap(waiting_blocks);
  for (auto& block : blocks) {
    if (failed) return;
    enter(*block);
    for (Thread& thread : block->threads)
      if (thread.state == State::AT_COUNTER) thread.state = State::READY;
    if (run_block()) {
      changes++;
      spare_blocks.push_back(std::move(block));
    } else {
      put_aside(*block);
      waiting_blocks.push_back(std::move(block));
    }
  }
}

void run_blocks() {
  const unsigned blocks = grid_size.x * grid_size.y * grid_size.z;
  for (unsigned step = 0; step < blocks && !failed; step++) {
    const unsigned index = reversed ? blocks - 1 - step : step;
    auto block = make_block();
    if (!block) return;
    block->index = {index % grid_size.x, index / grid_size.x % grid_size.y, index / grid_size.x / grid_size.y};
    begin(*block);
    const bool ended = run_block();
    if (!ended) put_aside(*block);
    (ended ? spare_blocks : waiting_blocks).push_back(std::move(block));
  }
  for (unsigned idle = 0; !failed && !waiting_blocks.empty(); idle++) {
    const unsigned long long before = changes;
    run_all_waiting();
    if (changes != before) idle = 0;
    if (idle < IDLE_ROUNDS || failed) continue;
    enter(*waiting_blocks.front());
    report("blocks wait for ever:");
    for (const auto& block : waiting_blocks) {
      enter(*block);
      if (&block != &waiting_blocks.front())
        append("; block (%u, %u, %u):", block_index.x, block_index.y, block_index.z);
      describe_threads();
    }
  }
}

// ---- a launch ----

void on_signal(int number) { siglongjmp(recover, number); }

const char* signal_meaning(int number) {
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

}  // namespace

const char* launch(const unsigned grid[3], unsigned block, size_t shared_bytes, int order) {
  failed = false;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block, 1, 1};
  block_index = {};
  reversed = order != 0;
  const size_t static_bytes = static_shared_bytes();
  if (block == 0 || block > 1024) report("%u threads a block; 1 to 1024 are possible", block);
  if (static_bytes > STATIC_SHARED_LIMIT) report("%zu bytes of static shared memory, more than 48 KiB", static_bytes);
  if (static_bytes + shared_bytes > SHARED_LIMIT)
    report("%zu bytes of shared memory, more than 227 KiB", static_bytes + shared_bytes);
  if (failed) return message;

  dynamic_shared_bytes = shared_bytes;
  {
    SignalHandlers handlers;
    const int number = sigsetjmp(recover, 1);
    if (number == 0) run_blocks();
    else report("thread %u: %s", current, signal_meaning(number));
  }
  waiting_blocks.clear();
  spare_blocks.clear();
  return failed ? message : nullptr;
}

}  // namespace emulate
