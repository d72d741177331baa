#include "backend.h"

#include <algorithm>

namespace dsv4c {

uint64_t largest_arena(const Plan& plan) {
  uint64_t bytes = 0;
  for (uint32_t bucket : plan.main_buckets) bytes = std::max(bytes, plan.buckets[bucket].arena_bytes);
  return bytes;
}

uint32_t largest_bucket(const Plan& plan) {
  uint32_t tokens = 0;
  for (uint32_t bucket : plan.main_buckets) tokens = std::max(tokens, plan.buckets[bucket].tokens);
  return tokens;
}

}  // namespace dsv4c
