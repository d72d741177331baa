#pragma once

#include <functional>
#include <string>
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
  // Buckets of the entry point main that the machine runs.
  std::vector<uint32_t> main_buckets;
  // State planes that count the routing of a layer, in the order of the layers.
  std::vector<uint32_t> counted_states;

  const char* text(uint32_t offset) const { return strings.data() + offset; }
  // Experts of a counted layer; 0 where none is counted.
  uint32_t counted_experts() const { return counted_states.empty() ? 0 : states[counted_states.front()].rows; }
  int32_t mask_words() const { return static_cast<int32_t>((header.vocab_size + 31) / 32); }
};

// The machine that an engine is opened for, as far as a plan must fit it.
struct Machine {
  // Whether the runtime has a kernel by that name. Null on a GPU, whose kernels are images in the engine.
  std::function<bool(std::string_view)> has_kernel;
  uint64_t kernel_bytes = 0;  // of the KERNELS section
  std::string name;           // "GPU 0 (NVIDIA H100 80GB HBM3)"; empty on a cpu
  uint32_t sm_count = 0;      // 0 on a cpu

  bool runs_images() const { return !has_kernel; }
};

// Streaming multiprocessors that a bucket is for; 0: any.
inline uint32_t sm_count_of(const Plan& plan, const format::Bucket& bucket) {
  return bucket.sm_count != 0 ? bucket.sm_count : plan.header.sm_count;
}

Plan read_plan(Bytes section, const format::Header& header, uint64_t weight_bytes, const Machine& machine);

// Bytes one slot (SLOT planes), one block (BLOCK planes) or a session (ROUTING_COUNTS) takes; `read_plan` has checked
// that it fits.
inline uint64_t unit_bytes(const format::State& state) { return state.rows * state.row_bytes; }

}  // namespace dsv4c
