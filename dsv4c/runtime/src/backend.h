#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "kernel.h"
#include "plan_reader.h"

namespace dsv4c {

// Addresses and sizes of one run of a bucket.
struct StepMemory {
  int64_t dims[format::kDimCount] = {};  // actual sizes by Dim
  std::byte* arena = nullptr;
  const std::byte* weights = nullptr;
  std::byte* const* states = nullptr;                // one plane each
  const void* inputs[format::kInputCount] = {};      // by Input; an absent mask is null
  void* outputs[format::kOutputCount] = {};          // by Output
};

struct LaunchReport {
  uint32_t index;  // in its bucket
  const format::Launch& launch;
  const ArgValue* outputs;
  double seconds;
};

// Called after every launch of a traced step; false stops the step.
using LaunchObserver = std::function<bool(const LaunchReport&)>;

// Executes the launches of a plan on one kind of machine. Used by several sessions at once.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual bool has_kernel(std::string_view name) const = 0;
  // Called once, before the first run.
  virtual void load(const Plan& plan) = 0;
  // Runs the launches of `bucket` in order: HEAD ones if dims say that logits are wanted, SAMPLE ones if `sampling`.
  virtual void run(const format::Bucket& bucket, const StepMemory& memory, bool sampling,
                   const LaunchObserver* observer) const = 0;
};

}  // namespace dsv4c
