#pragma once

#include <algorithm>
#include <cstdint>

namespace dsv4c::cpu {

// Multiply-adds (or as many other operations on a float) that are worth another thread's attention: tens of
// microseconds, a few times what waking a thread takes.
constexpr int64_t kPieceWork = 1 << 18;

// How many of `items` make a piece of a loop whose whole work is `work`. Less than two pieces' work stays in the
// calling thread. A fixed rule: the pieces never depend on the number of threads.
inline int64_t piece_items(int64_t items, int64_t work) {
  if (work < 2 * kPieceWork) return std::max<int64_t>(items, 1);
  const double share = static_cast<double>(kPieceWork) / static_cast<double>(work);
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(items) * share));
}

}  // namespace dsv4c::cpu
