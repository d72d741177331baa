#include "shared_barriers.h"

namespace emulate {

constexpr long long BARRIER_LIMIT = (1 << 20) - 1;  // of arrivals and of bytes
constexpr unsigned long long BARRIER_MARK = 0xBA77'1E5D'0000'0000;

static bool in_shared(const void* start, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(start);
  if (from >= dynamic_shared && from + bytes <= dynamic_shared + dynamic_shared_bytes) return true;
  return from >= __start_dsv4c_shared && from + bytes <= __stop_dsv4c_shared;
}

// ---- cp.async ----

static void make_copy(AsyncCopy& copy) {
  if (copy.bytes == 0) return;
  if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
  else std::memset(copy.to, 0, copy.bytes);
  copy.bytes = 0;
}

void start_copy(void* to, const void* from, unsigned bytes) {
  auto& groups = self().groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from, bytes});
}

void commit_copies() {
  auto& groups = self().groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

// A copy happens as late as it may: whoever reads before waiting finds what was there. Those that a cp_async_arrive
// took over happen now, whichever the group.
void wait_for_copies(unsigned pending) {
  for (Landing& landing : running->landings)
    if (landing.thread == current)
      for (AsyncCopy& copy : landing.copies) make_copy(copy);
  auto& groups = self().groups;
  if (groups.empty()) return;
  const size_t committed = groups.size() - 1;
  const size_t done = committed > pending ? committed - pending : 0;
  for (size_t group = 0; group < done; group++)
    for (AsyncCopy& copy : groups[group]) make_copy(copy);
  groups.erase(groups.begin(), groups.begin() + done);
}

// ---- barriers ----

static unsigned find_barrier(unsigned long long* place, const char* what, int line, bool by_copy = false) {
  if (!in_shared(place, 8)) {
    report("thread %u: %s in line %d of a barrier that is not in shared memory", current, what, line);
    stop();
  }
  const unsigned index = (unsigned)*place;
  if ((*place ^ index) != BARRIER_MARK || index >= running->barriers.size() ||
      running->barriers[index].place != place) {
    report("thread %u: %s in line %d of a barrier that was not initialised, or has been overwritten", current, what,
           line);
    stop();
  }
  const SharedBarrier& barrier = running->barriers[index];
  if (!barrier.fenced && (by_copy || barrier.owner != current)) {
    report("thread %u: %s in line %d of a barrier without a barrier_init_fence by thread %u, which initialised it",
           current, what, line, barrier.owner);
    stop();
  }
  return index;
}

void barrier_init(unsigned long long* place, int arrivals, int line) {
  if (arrivals < 1 || arrivals > BARRIER_LIMIT) {
    report("thread %u: barrier_init in line %d for %d arrivals", current, line, arrivals);
    stop();
  }
  if (!in_shared(place, 8)) {
    report("thread %u: barrier_init in line %d of a barrier that is not in shared memory", current, line);
    stop();
  }
  for (const SharedBarrier& other : running->barriers)
    if (other.place == place) {
      report("thread %u: barrier_init in line %d of a barrier that thread %u has initialised", current, line,
             other.owner);
      stop();
    }
  *place = BARRIER_MARK | running->barriers.size();
  SharedBarrier barrier;
  barrier.place = place;
  barrier.expected = barrier.missing = arrivals;
  barrier.owner = current;
  running->barriers.push_back(barrier);
}

void barrier_init_fence() {
  for (SharedBarrier& barrier : running->barriers)
    if (barrier.owner == current) barrier.fenced = true;
}

static void end_phase_if_complete(SharedBarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  if (barrier.woken) {
    report("the barrier at byte %zu of shared memory ends phase %u before all threads that wait for phase %u have run: "
           "they could miss it", shared_byte(barrier.place), barrier.phase, barrier.phase - 1);
    return;
  }
  barrier.phase++;
  barrier.missing = barrier.expected;
  barrier.woken = (unsigned)barrier.waiting.size();
  make_ready(barrier.waiting);
}

// `bytes`: announced (positive) or copied (negative).
static void change_bytes(SharedBarrier& barrier, long long bytes, int line) {
  barrier.bytes += bytes;
  if (barrier.bytes < -BARRIER_LIMIT || barrier.bytes > BARRIER_LIMIT)
    report("the barrier at byte %zu of shared memory has %lld bytes to wait for in line %d; at most %lld are possible",
           shared_byte(barrier.place), barrier.bytes, line, BARRIER_LIMIT);
}

static void arrive(SharedBarrier& barrier, const char* what, int line) {
  if (barrier.missing == 0) {
    report("thread %u: %s in line %d is one arrival more than the %u of phase %u, whose bytes have not all come",
           current, what, line, barrier.expected, barrier.phase);
    return;
  }
  barrier.missing--;
  end_phase_if_complete(barrier);
}

void barrier_arrive(unsigned long long* place, int line) {
  arrive(running->barriers[find_barrier(place, "barrier_arrive", line)], "barrier_arrive", line);
  stop_if_failed();
}

void barrier_expect(unsigned long long* place, int bytes, int line) {
  SharedBarrier& barrier = running->barriers[find_barrier(place, "barrier_expect", line)];
  if (bytes < 0) report("thread %u: barrier_expect in line %d of %d bytes", current, line, bytes);
  change_bytes(barrier, bytes, line);
  arrive(barrier, "barrier_expect", line);
  stop_if_failed();
}

void barrier_wait(unsigned long long* place, unsigned parity, int line) {
  SharedBarrier& barrier = running->barriers[find_barrier(place, "barrier_wait", line)];
  if (parity > 1) {
    report("thread %u: barrier_wait in line %d for parity %u", current, line, parity);
    stop();
  }
  if ((barrier.phase & 1) != parity) return;
  barrier.waiting.push_back(current);
  wait_at(State::AT_BARRIER, "barrier_wait", line, &barrier);
  barrier.woken--;
}

// ---- what arrives later ----

// An ordinary store is not in the view until a fence; these are no ordinary stores.
static void set_view(void* to, size_t bytes) {
  std::vector<unsigned char>& view = running->view.bytes;
  if (view.empty()) view.assign(dynamic_shared_bytes, POISON);
  const size_t byte = shared_byte(to);
  if (byte < view.size()) std::memcpy(view.data() + byte, to, bytes);
}

void land(Landing& landing) {
  for (AsyncCopy& copy : landing.copies) make_copy(copy);
  if (landing.to) {
    std::memcpy(landing.to, landing.from, landing.bytes);
    set_view(landing.to, landing.bytes);
  }
  SharedBarrier& barrier = running->barriers[landing.barrier];
  current = landing.thread;
  if (landing.to) {
    change_bytes(barrier, -(long long)landing.bytes, landing.line);
    end_phase_if_complete(barrier);
  } else {
    arrive(barrier, "cp_async_arrive", landing.line);
  }
}

static void start_landing(Landing landing) {
  if (reversed) land(landing);
  else running->landings.push_back(std::move(landing));
  stop_if_failed();
}

void bulk_copy(void* to, const void* from, int bytes, unsigned long long* place, unsigned long long policy,
                      int line) {
  const unsigned barrier = find_barrier(place, "bulk_copy", line, true);
  if (policy != NO_POLICY && policy != EVICT_FIRST) {
    report("thread %u: bulk_copy in line %d with a policy that no function made", current, line);
    stop();
  }
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) {
    report("thread %u: bulk_copy in line %d of %d bytes, which with both addresses must be multiples of 16", current,
           line, bytes);
    stop();
  }
  if (bytes <= 0 || bytes > BARRIER_LIMIT || !in_shared(to, bytes)) {
    report("thread %u: bulk_copy in line %d of %d bytes to byte %lld of shared memory, which has %zu", current, line,
           bytes, (long long)((unsigned char*)to - dynamic_shared), dynamic_shared_bytes);
    stop();
  }
  std::memset(to, POISON, bytes);
  set_view(to, bytes);
  start_landing({current, line, barrier, to, from, (unsigned)bytes, {}});
}

// The thread's copies so far, then an arrival.
void cp_async_arrive(unsigned long long* place, int line) {
  const unsigned barrier = find_barrier(place, "cp_async_arrive", line);
  Landing landing = {current, line, barrier, nullptr, nullptr, 0, {}};
  for (const auto& group : self().groups) landing.copies.insert(landing.copies.end(), group.begin(), group.end());
  self().groups.clear();
  start_landing(std::move(landing));
}

void check_barriers() {
  if (!running->landings.empty()) {
    const Landing& landing = running->landings.front();
    report("thread %u: %s in line %d was still under way when the block ended", landing.thread,
           landing.to ? "bulk_copy" : "cp_async_arrive", landing.line);
  }
  for (const SharedBarrier& barrier : running->barriers)
    if (barrier.bytes)
      report("the barrier at byte %zu of shared memory has %lld bytes to wait for at the end of the block",
             shared_byte(barrier.place), barrier.bytes);
}

}  // namespace emulate
