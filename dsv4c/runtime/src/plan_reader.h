#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "engine_file.h"
#include "engine_format.h"

namespace dsv4c {

// The PLAN section as vectors. After `read_plan`, every index, offset and extent in them can be used unchecked.
struct Plan {
  format::PlanHeader header;
  std::vector<format::EntryPoint> entry_points;
  std::vector<format::Bucket> buckets;
  std::vector<format::Launch> launches;
  std::vector<format::Arg> args;
  std::vector<format::Tensor> tensors;
  std::vector<format::State> states;
  std::vector<format::Kernel> kernels;
  std::vector<uint32_t> eos_ids;
  std::vector<char> strings;  // ends with a zero, so every offset is a terminated string
  format::EntryPoint main;

  const char* text(uint32_t offset) const { return strings.data() + offset; }
  int32_t mask_words() const { return static_cast<int32_t>((header.vocab_size + 31) / 32); }
};

// `has_kernel` says whether the backend knows a kernel by name.
Plan read_plan(Bytes section, const format::Header& header, uint64_t weight_bytes,
               const std::function<bool(std::string_view)>& has_kernel);

// Bytes one slot (SLOT planes) or one block (BLOCK planes) takes; `read_plan` has checked that it fits.
inline uint64_t unit_bytes(const format::State& state) { return state.rows * state.row_bytes; }

}  // namespace dsv4c
