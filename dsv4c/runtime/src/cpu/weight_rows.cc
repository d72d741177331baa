#include "cpu/weight_rows.h"

#include <algorithm>

#include "cpu/rows.h"

namespace dsv4c::cpu {

namespace {

constexpr int64_t kFp4Group = 32;

// Both columns of a packed byte.
struct Pair {
  float low, high;
};

constexpr std::array<Pair, 256> kE2m1Pairs = [] {
  std::array<Pair, 256> pairs{};
  for (size_t byte = 0; byte < 256; ++byte) pairs[byte] = {kE2m1[byte & 15], kE2m1[byte >> 4]};
  return pairs;
}();

// Address of matrix `expert` of a stack, or of the one matrix.
const char* matrix(const TensorView& t, int64_t expert) {
  return t.as<const char>() + (t.ndim == 3 ? expert * t.stride[0] * dtype_size(t.dtype) : 0);
}

}  // namespace

WeightRows::WeightRows(const TensorView& weight, const TensorView* scales, int64_t block_rows, int64_t block_columns,
                       int64_t expert)
    : data_(matrix(weight, expert)),
      dtype_(weight.dtype),
      rows_(weight.size[weight.ndim - 2]),
      columns_(weight.size[weight.ndim - 1]),
      stride_(weight.stride[weight.ndim - 2]) {
  if (scales == nullptr) {
    if (dtype_ != DType::F32 && dtype_ != DType::BF16 && dtype_ != DType::F16) {
      unsupported("a weight without scales", dtype_);
    }
    return;
  }
  scales_ = matrix(*scales, expert);
  scale_dtype_ = scales->dtype;
  scale_stride_ = scales->stride[scales->ndim - 2];
  if (scale_dtype_ != DType::F8E8M0 && scale_dtype_ != DType::U8 && scale_dtype_ != DType::F32) {
    unsupported("a scale", scale_dtype_);
  }
  if (dtype_ == DType::F8E4M3) {
    block_rows_ = block_rows;
    block_columns_ = block_columns;
  } else if (dtype_ == DType::F4E2M1X2 || dtype_ == DType::U8 || dtype_ == DType::I8) {
    columns_ *= 2;
    block_columns_ = kFp4Group;
  } else {
    unsupported("a weight with scales", dtype_);
  }
  require(block_rows_ > 0 && block_columns_ > 0, "a weight with scales has empty blocks");
  require(scales->ndim == weight.ndim && scales->size[weight.ndim - 2] >= divide_up(rows_, block_rows_) &&
              scales->size[weight.ndim - 1] >= divide_up(columns_, block_columns_),
          "a weight has too few scales");
}

float WeightRows::scale(int64_t row, int64_t column) const {
  const int64_t at = row / block_rows_ * scale_stride_ + column / block_columns_;
  if (scale_dtype_ == DType::F32) return reinterpret_cast<const float*>(scales_)[at];
  return kE8m0[static_cast<uint8_t>(scales_[at])];
}

void WeightRows::decode(int64_t row, float* to) const {
  const char* from = data_ + row * stride_ * dtype_size(dtype_);
  if (scales_ == nullptr) {
    load_floats(from, dtype_, columns_, to);
    return;
  }
  const auto* codes = reinterpret_cast<const uint8_t*>(from);
  for (int64_t start = 0; start < columns_; start += block_columns_) {
    const int64_t end = std::min(start + block_columns_, columns_);
    const float factor = scale(row, start);
    if (dtype_ == DType::F8E4M3) {
      for (int64_t i = start; i < end; ++i) to[i] = kE4m3[codes[i]] * factor;
    } else {
      for (int64_t i = start; i < end; i += 2) {
        const Pair pair = kE2m1Pairs[codes[i / 2]];
        to[i] = pair.low * factor;
        to[i + 1] = pair.high * factor;
      }
    }
  }
}

const float* WeightRows::read(int64_t first, int64_t count, float* scratch, int64_t* stride) const {
  if (dtype_ == DType::F32) {
    *stride = stride_;
    return reinterpret_cast<const float*>(data_) + first * stride_;
  }
  *stride = columns_;
  for (int64_t i = 0; i < count; ++i) decode(first + i, scratch + i * columns_);
  return scratch;
}

}  // namespace dsv4c::cpu
