#pragma once

#include <cstdint>
#include <vector>

#include "kernel.h"

namespace dsv4c::cpu {

// A state plane [A, B, row] of the KV ring, the compressed entries or the index keys, in any of its formats:
// - float32 or bfloat16;
// - packed KV rows (uint8): e4m3 codes of the plain channels, the rotary channels as bfloat16, padding; exponents per
//   64 channels in `scales`;
// - index keys: e4m3 codes or packed e2m1, exponents per 32 channels in `scales`.
class StateRows {
 public:
  // `width` is that of the decoded row; `scales` is null for a float plane.
  StateRows(const TensorView& plane, const TensorView* scales, int64_t width, int64_t rotary_dim);

  int64_t outer() const { return plane_.size[0]; }
  int64_t inner() const { return plane_.size[1]; }

  // Row [i, j] as float32: in place where it is that, else in `scratch`.
  const float* read(int64_t i, int64_t j, float* scratch) const;
  void write(int64_t i, int64_t j, const float* row) const;

 private:
  enum class Format { FLOAT, PACKED_KV, KEY_E4M3, KEY_E2M1 };

  TensorView plane_;
  TensorView scales_;
  Format format_;
  int64_t width_;
  int64_t plain_;  // channels of a packed row that have scales
};

// The rows of one slot in this step, in order; their positions are consecutive from `first`.
struct StepRun {
  int64_t slot;
  int64_t first;
  std::vector<int64_t> rows;
};

struct StepRuns {
  StepRuns(const TensorView& slots, const TensorView& positions, int64_t slot_count);

  std::vector<StepRun> runs;
  // Of each row of the step: its run and its place there.
  std::vector<int64_t> run_of_row;
  std::vector<int64_t> offset_of_row;
};

}  // namespace dsv4c::cpu
