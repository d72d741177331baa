#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/formats.h"
#include "kernel.h"

// A tensor as rows of its last dimension, read as float32 and written with one rounding.
namespace dsv4c::cpu {

using Floats = std::unique_ptr<float[]>;

inline Floats make_floats(int64_t count) { return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count)); }

[[noreturn]] inline void unsupported(const char* what, DType dtype) {
  throw std::logic_error(std::string(what) + " does not take " + dtype_name(dtype));
}

// Shapes come from a plan; one that does not fit its kernel must not become a read outside a tensor.
inline void require(bool fits, const char* message) {
  if (!fits) throw std::logic_error(message);
}

// Null where the argument is absent.
inline const TensorView* optional_tensor(const KernelArgs& args, size_t i) {
  return args.has(i) ? &args.tensor(i) : nullptr;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t row_width(const TensorView& t) { return t.size[t.ndim - 1]; }

inline int64_t row_count(const TensorView& t) {
  int64_t count = 1;
  for (uint32_t i = 0; i + 1 < t.ndim; ++i) count *= t.size[i];
  return count;
}

inline bool same_rows(const TensorView& a, const TensorView& b) {
  return row_count(a) == row_count(b) && row_width(a) == row_width(b);
}

// Offset in elements of row `row`, counted through the leading dimensions.
inline int64_t row_offset(const TensorView& t, int64_t row) {
  if (t.ndim == 2) return row * t.stride[0];
  int64_t offset = 0;
  for (uint32_t i = t.ndim - 1; i-- > 0;) {
    offset += row % t.size[i] * t.stride[i];
    row /= t.size[i];
  }
  return offset;
}

inline void* row_address(const TensorView& t, int64_t row) {
  return t.as<char>() + row_offset(t, row) * dtype_size(t.dtype);
}

// Row t[i, j] of a tensor of three dimensions.
inline uint8_t* row_bytes(const TensorView& t, int64_t i, int64_t j) {
  return t.as<uint8_t>() + (i * t.stride[0] + j * t.stride[1]) * dtype_size(t.dtype);
}

inline void load_floats(const void* from, DType dtype, int64_t count, float* to) {
  switch (dtype) {
    case DType::F32:
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::BF16: {
      const auto* source = static_cast<const bf16*>(from);
      for (int64_t i = 0; i < count; ++i) to[i] = to_float(source[i]);
      return;
    }
    case DType::F16: {
      const auto* source = static_cast<const uint16_t*>(from);
      for (int64_t i = 0; i < count; ++i) to[i] = decode_f16(source[i]);
      return;
    }
    default:
      unsupported("a float row", dtype);
  }
}

inline void store_floats(const float* from, DType dtype, int64_t count, void* to) {
  switch (dtype) {
    case DType::F32:
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::BF16: {
      auto* target = static_cast<bf16*>(to);
      for (int64_t i = 0; i < count; ++i) target[i] = to_bf16(from[i]);
      return;
    }
    case DType::F16: {
      auto* target = static_cast<uint16_t*>(to);
      for (int64_t i = 0; i < count; ++i) target[i] = encode_f16(from[i]);
      return;
    }
    default:
      unsupported("a float row", dtype);
  }
}

inline void store_float(float value, DType dtype, void* base, int64_t index) {
  store_floats(&value, dtype, 1, static_cast<char*>(base) + index * dtype_size(dtype));
}

// Rounds in place to the values that `dtype` holds.
inline void round_floats(float* x, DType dtype, int64_t count) {
  switch (dtype) {
    case DType::F32:
      return;
    case DType::BF16:
      for (int64_t i = 0; i < count; ++i) x[i] = to_float(to_bf16(x[i]));
      return;
    case DType::F16:
      for (int64_t i = 0; i < count; ++i) x[i] = decode_f16(encode_f16(x[i]));
      return;
    default:
      unsupported("an activation", dtype);
  }
}

inline void read_row(const TensorView& t, int64_t row, float* to) {
  load_floats(row_address(t, row), t.dtype, row_width(t), to);
}

inline void write_row(const TensorView& t, int64_t row, const float* from) {
  store_floats(from, t.dtype, row_width(t), row_address(t, row));
}

// The row itself where it is float32, else its values in `scratch`.
inline const float* float_row(const TensorView& t, int64_t row, float* scratch) {
  if (t.dtype == DType::F32) return static_cast<const float*>(row_address(t, row));
  read_row(t, row, scratch);
  return scratch;
}

// A whole small tensor, row by row.
inline std::vector<float> read_all(const TensorView& t) {
  const int64_t rows = row_count(t), width = row_width(t);
  std::vector<float> values(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) read_row(t, row, values.data() + row * width);
  return values;
}

// Rows first..first+count of a tensor as float32 with one stride, copied unless they are that already.
class FloatRows {
 public:
  FloatRows(const TensorView& t, int64_t first, int64_t count) {
    if (t.dtype == DType::F32 && t.ndim == 2) {
      data_ = static_cast<const float*>(row_address(t, first));
      stride_ = t.stride[0];
      return;
    }
    stride_ = row_width(t);
    copy_ = make_floats(count * stride_);
    for (int64_t row = 0; row < count; ++row) read_row(t, first + row, copy_.get() + row * stride_);
    data_ = copy_.get();
  }

  const float* row(int64_t i) const { return data_ + i * stride_; }

 private:
  Floats copy_;
  const float* data_ = nullptr;
  int64_t stride_ = 0;
};

inline const int32_t* int_values(const TensorView& t) {
  if (t.dtype != DType::I32) unsupported("an index", t.dtype);
  return t.as<int32_t>();
}

}  // namespace dsv4c::cpu
