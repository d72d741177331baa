#pragma once

#include <cstdint>
#include <vector>

#include "cpu/simd/simd.h"
#include "kernel.h"

namespace dsv4c::cpu {

// A stored matrix [O, I]. Formats: float32, bfloat16, float16; e4m3 with a scale per block; e2m1 with a scale per 32
// columns; int8 and int4 (two's complement) with a half-precision scale per group of columns. Packed codes (e2m1, int4)
// are two columns a byte, the even one in the lower nibble.
class WeightRows {
 public:
  // `scales` is null for a float matrix. Both may be stacks [E, ...], of which `expert` is taken.
  WeightRows(const TensorView& weight, const TensorView* scales, int64_t block_rows, int64_t block_columns,
             int64_t expert = 0);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  Encoding encoding() const { return encoding_; }

 private:
  friend class RowReader;

  void decode(int64_t row, float* to) const;
  // The scales of `count` rows of scales, as float32 [count, groups].
  void expand_scales(int64_t first, int64_t count, float* to) const;

  const uint8_t* data_;
  DType dtype_;
  int64_t rows_;
  int64_t columns_;
  int64_t row_bytes_;
  Encoding encoding_ = Encoding::F32;
  const char* scales_ = nullptr;
  DType scale_dtype_ = DType::F8E8M0;
  int64_t scale_stride_ = 0;
  int64_t block_rows_ = 1;
  int64_t block_columns_ = 1;
  int64_t groups_ = 0;  // scales of a row
};

// Hands rows to the inner loops: in their stored width with float32 scales, or decoded where the blocks of scales do
// not fit the loops. A result is valid until the next read.
class RowReader {
 public:
  StoredRows read(const WeightRows& weight, int64_t first, int64_t count);

 private:
  std::vector<float> scales_;
  std::vector<float> decoded_;
};

}  // namespace dsv4c::cpu
