#include "counters.h"

namespace emulate {

constexpr unsigned LOOKS = 16;  // at changing places, before others run

unsigned long long changes = 0;

void pause(const char* what, int line) {
  self().polls = 0;
  wait_at(State::AT_COUNTER, what, line);
}

unsigned load_acquire(const unsigned* counter, int line) {
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

unsigned fetch_add(unsigned* counter, unsigned value) {
  const unsigned before = *counter;
  *counter = before + value;
  if (value) changes++;
  return before;
}

}  // namespace emulate
