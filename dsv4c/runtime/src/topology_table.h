#pragma once

#include <cstdint>
#include <vector>

namespace dsv4c {

// A table of dsv4c/graph/topology.py: the experts by rank, the first rank of every group and one past the last, and of
// every streaming multiprocessor its group, its index in that and how many the group has. Zeros may follow. Kernels
// follow it unchecked.
//
// What is wrong with it, null if nothing is; `read_table` there is the same rule.
inline const char* topology_fault(const int32_t* values, uint64_t count, uint64_t experts, uint64_t groups,
                                  uint64_t sm_count) {
  if (experts == 0 || groups == 0 || experts > count || groups >= count - experts ||
      sm_count > (count - experts - groups - 1) / 3)
    return "it is too short";
  const int32_t* ranks = values + experts;
  const int32_t* seats = ranks + groups + 1;
  const auto is = [](int32_t value, uint64_t wanted) { return value >= 0 && static_cast<uint64_t>(value) == wanted; };

  std::vector<bool> listed(experts);
  for (uint64_t rank = 0; rank < experts; ++rank) {
    const int32_t expert = values[rank];
    if (expert < 0 || static_cast<uint64_t>(expert) >= experts || listed[static_cast<uint64_t>(expert)])
      return "an expert is missing or there twice";
    listed[static_cast<uint64_t>(expert)] = true;
  }
  // No group is without experts: there are no more groups than those.
  bool ascends = is(ranks[0], 0) && is(ranks[groups], experts);
  for (uint64_t group = 0; group < groups; ++group) ascends &= ranks[group] < ranks[group + 1];
  if (!ascends) return "the ranks of the groups do not cover the experts";
  for (uint64_t group = 0; group < groups; ++group)
    for (int32_t rank = ranks[group] + 1; rank < ranks[group + 1]; ++rank)
      if (values[rank - 1] >= values[rank]) return "the experts of a group do not ascend";

  constexpr const char* kSeats = "the seats of the SMs do not follow the groups";
  uint64_t sm = 0;
  for (uint64_t group = 0; group < groups; ++group) {
    if (sm == sm_count) return kSeats;
    const int32_t sms = seats[3 * sm + 2];
    if (sms < 1 || static_cast<uint64_t>(sms) > sm_count - sm) return kSeats;
    for (uint64_t index = 0; index < static_cast<uint64_t>(sms); ++index, ++sm)
      if (!is(seats[3 * sm], group) || !is(seats[3 * sm + 1], index) || seats[3 * sm + 2] != sms) return kSeats;
  }
  if (sm != sm_count) return kSeats;
  for (const int32_t* rest = seats + 3 * sm_count; rest != values + count; ++rest)
    if (*rest != 0) return "behind it are numbers that belong to nothing";
  return nullptr;
}

}  // namespace dsv4c
