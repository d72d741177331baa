#include "cpu/weight_rows.h"

#include <algorithm>

#include "cpu/rows.h"

namespace dsv4c::cpu {

namespace {

constexpr int64_t kFp4Group = 32;

// Address of matrix `expert` of a stack, or of the one matrix.
const char* matrix(const TensorView& t, int64_t expert) {
  return t.as<const char>() + (t.ndim == 3 ? expert * t.stride[0] * dtype_size(t.dtype) : 0);
}

Encoding float_encoding(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return Encoding::F32;
    case DType::BF16:
      return Encoding::BF16;
    case DType::F16:
      return Encoding::F16;
    default:
      unsupported("a weight without scales", dtype);
  }
}

// Packed e2m1 also comes as plain bytes.
Encoding scaled_encoding(DType dtype, DType scale_dtype) {
  if (scale_dtype == DType::F16) {
    if (dtype == DType::I8) return Encoding::I8;
    if (dtype == DType::U8) return Encoding::I4;
    unsupported("a weight with float16 scales", dtype);
  }
  if (scale_dtype != DType::F8E8M0 && scale_dtype != DType::U8 && scale_dtype != DType::F32) {
    unsupported("a scale", scale_dtype);
  }
  if (dtype == DType::F8E4M3) return Encoding::E4M3;
  if (dtype == DType::F4E2M1X2 || dtype == DType::U8 || dtype == DType::I8) return Encoding::E2M1;
  unsupported("a weight with scales", dtype);
}

}  // namespace

WeightRows::WeightRows(const TensorView& weight, const TensorView* scales, int64_t block_rows, int64_t block_columns,
                       int64_t expert)
    : data_(reinterpret_cast<const uint8_t*>(matrix(weight, expert))),
      dtype_(weight.dtype),
      rows_(weight.size[weight.ndim - 2]),
      columns_(weight.size[weight.ndim - 1]),
      row_bytes_(weight.stride[weight.ndim - 2] * dtype_size(weight.dtype)) {
  if (scales == nullptr) {
    encoding_ = float_encoding(dtype_);
    return;
  }
  encoding_ = scaled_encoding(dtype_, scales->dtype);
  scales_ = matrix(*scales, expert);
  scale_dtype_ = scales->dtype;
  scale_stride_ = scales->stride[scales->ndim - 2];
  if (is_packed(encoding_)) columns_ *= 2;
  if (encoding_ == Encoding::E4M3) block_rows_ = block_rows;
  block_columns_ = encoding_ == Encoding::E2M1 ? kFp4Group : block_columns;
  require(block_rows_ > 0 && block_columns_ > 0, "a weight with scales has empty blocks");
  groups_ = divide_up(columns_, block_columns_);
  require(!is_packed(encoding_) || block_columns_ % kChunk == 0, "a packed weight has groups of no whole 32 columns");
  require(scales->ndim == weight.ndim && scales->size[weight.ndim - 2] >= divide_up(rows_, block_rows_) &&
              scales->size[weight.ndim - 1] >= groups_,
          "a weight has too few scales");
}

void WeightRows::expand_scales(int64_t first, int64_t count, float* to) const {
  if (scale_stride_ != groups_ && count > 1) {
    for (int64_t r = 0; r < count; ++r) expand_scales(first + r, 1, to + r * groups_);
    return;
  }
  const char* from = scales_ + first * scale_stride_ * dtype_size(scale_dtype_);
  if (scale_dtype_ == DType::F32) {
    std::memcpy(to, from, static_cast<size_t>(count * groups_) * sizeof(float));
  } else if (scale_dtype_ == DType::F16) {
    simd().expand_f16(reinterpret_cast<const uint16_t*>(from), count * groups_, to);
  } else {
    simd().expand_e8m0(reinterpret_cast<const uint8_t*>(from), count * groups_, to);
  }
}

// Of e4m3 and int8, which may have blocks of any size; packed codes and floats are never decoded here.
void WeightRows::decode(int64_t row, float* to) const {
  const uint8_t* codes = data_ + row * row_bytes_;
  std::vector<float> factors(static_cast<size_t>(groups_));
  expand_scales(row / block_rows_, 1, factors.data());
  for (int64_t i = 0; i < columns_; ++i) {
    const float value =
        encoding_ == Encoding::E4M3 ? kE4m3[codes[i]] : static_cast<float>(static_cast<int8_t>(codes[i]));
    to[i] = value * factors[static_cast<size_t>(i / block_columns_)];
  }
}

StoredRows RowReader::read(const WeightRows& weight, int64_t first, int64_t count) {
  StoredRows rows;
  rows.encoding = weight.encoding_;
  rows.codes = weight.data_ + first * weight.row_bytes_;
  rows.row_bytes = weight.row_bytes_;
  if (weight.scales_ == nullptr) return rows;
  bool fits = weight.block_columns_ % kChunk == 0;
  if (fits) {
    const int64_t groups = weight.groups_;
    scales_.resize(static_cast<size_t>(kBlockRows * groups));
    // Rows of one block share their scales.
    int64_t distinct = count;
    if (weight.block_rows_ == 1) {
      weight.expand_scales(first, count, scales_.data());
    } else {
      const int64_t block = first / weight.block_rows_;
      if ((first + count - 1) / weight.block_rows_ == block) distinct = 1;
      for (int64_t r = 0; r < distinct; ++r) {
        weight.expand_scales((first + r) / weight.block_rows_, 1, scales_.data() + r * groups);
      }
    }
    rows.scales = scales_.data();
    rows.scale_stride = distinct == 1 ? 0 : groups;
    rows.group = weight.block_columns_;
    if (weight.encoding_ == Encoding::E4M3) {
      const auto end = scales_.begin() + distinct * groups;
      fits = std::none_of(scales_.begin(), end, [](float scale) { return scale > kMaxE4m3Scale; });
    }
  }
  if (fits) return rows;
  decoded_.resize(static_cast<size_t>(kBlockRows * weight.columns_));
  for (int64_t r = 0; r < count; ++r) weight.decode(first + r, decoded_.data() + r * weight.columns_);
  rows = {};
  rows.codes = reinterpret_cast<const uint8_t*>(decoded_.data());
  rows.row_bytes = weight.columns_ * static_cast<int64_t>(sizeof(float));
  return rows;
}

}  // namespace dsv4c::cpu
