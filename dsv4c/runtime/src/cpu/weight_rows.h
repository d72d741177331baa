#pragma once

#include <cstdint>

#include "kernel.h"

namespace dsv4c::cpu {

// A stored matrix [O, I] whose rows are decoded to float32. Formats: float32, bfloat16, float16; e4m3 with a scale per
// block; packed e2m1 (two columns a byte, the even one in the lower nibble) with a scale per 32 columns.
class WeightRows {
 public:
  // `scales` is null for a float matrix. Both may be stacks [E, ...], of which `expert` is taken.
  WeightRows(const TensorView& weight, const TensorView* scales, int64_t block_rows, int64_t block_columns,
             int64_t expert = 0);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

  // Rows first..first+count at `*stride` floats from each other: in place if they are float32, else decoded to
  // `scratch` [count, I].
  const float* read(int64_t first, int64_t count, float* scratch, int64_t* stride) const;

 private:
  void decode(int64_t row, float* to) const;
  float scale(int64_t row, int64_t column) const;

  const char* data_;
  DType dtype_;
  int64_t rows_;
  int64_t columns_;
  int64_t stride_;  // elements
  const char* scales_ = nullptr;
  DType scale_dtype_ = DType::F8E8M0;
  int64_t scale_stride_ = 0;
  int64_t block_rows_ = 1;
  int64_t block_columns_ = 1;
};

}  // namespace dsv4c::cpu
