// Counters in global memory, by which blocks wait for one another: a look at one that has not changed lets others run.
#pragma once

#include "block.h"

namespace emulate {

constexpr unsigned LOOKS = 16;  // at changing places, before others run

inline unsigned long long changes = 0;  // of counters, and threads that have returned: what others may wait for

inline void pause(const char* what, int line) {
  self().polls = 0;
  wait_at(State::AT_COUNTER, what, line);
}

inline unsigned load_acquire(const unsigned* counter, int line) {
  const auto look = [=] { return *static_cast<const volatile unsigned*>(counter); };
  Thread& thread = self();
  unsigned value = look();
  if ((thread.polled == counter && thread.polled_value == value) || ++thread.polls == LOOKS) {
    thread.polls = 0;
    thread.polled = counter;
    thread.polled_value = value;
    wait_at(State::AT_COUNTER, "load_acquire", line, counter);
    value = look();
  }
  thread.polled = counter;
  thread.polled_value = value;
  return value;
}

inline unsigned fetch_add(unsigned* counter, unsigned value) {
  const unsigned before = *counter;
  *counter = before + value;
  if (value) changes++;
  return before;
}

}  // namespace emulate
