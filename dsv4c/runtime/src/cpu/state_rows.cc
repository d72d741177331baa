#include "cpu/state_rows.h"

#include "cpu/rows.h"

namespace dsv4c::cpu {

namespace {

constexpr int64_t kKvGroup = 64;
constexpr int64_t kIndexGroup = 32;

void decode_e4m3(const uint8_t* codes, const uint8_t* exponents, int64_t width, int64_t group, float* to) {
  for (int64_t i = 0; i < width; ++i) to[i] = kE4m3[codes[i]] * kE8m0[exponents[i / group]];
}

}  // namespace

StateRows::StateRows(const TensorView& plane, const TensorView* scales, int64_t width, int64_t rotary_dim)
    : plane_(plane), format_(Format::FLOAT), width_(width), plain_(width - rotary_dim) {
  int64_t stored = width;
  if (scales == nullptr) {
    if (plane.dtype != DType::F32 && plane.dtype != DType::BF16) {
      unsupported("a state plane without scales", plane.dtype);
    }
  } else {
    scales_ = *scales;
    if (dtype_size(scales->dtype) != 1) unsupported("a plane of exponents", scales->dtype);
    int64_t groups = divide_up(width, kIndexGroup);
    if (plane.dtype == DType::U8) {
      format_ = Format::PACKED_KV;
      stored = plain_ + 2 * rotary_dim;
      groups = divide_up(plain_, kKvGroup);
    } else if (plane.dtype == DType::F8E4M3) {
      format_ = Format::KEY_E4M3;
    } else if (plane.dtype == DType::F4E2M1X2) {
      format_ = Format::KEY_E2M1;
      stored = divide_up(width, 2);
    } else {
      unsupported("a state plane with scales", plane.dtype);
    }
    require(scales->ndim == 3 && scales->size[2] >= groups, "a plane of exponents is too narrow");
  }
  require(plane.ndim == 3 && plane.size[2] >= stored, "a state plane is too narrow");
}

const float* StateRows::read(int64_t i, int64_t j, float* scratch) const {
  const uint8_t* row = row_bytes(plane_, i, j);
  if (format_ == Format::FLOAT) {
    if (plane_.dtype == DType::F32) return reinterpret_cast<const float*>(row);
    load_floats(row, plane_.dtype, width_, scratch);
    return scratch;
  }
  const uint8_t* exponents = row_bytes(scales_, i, j);
  switch (format_) {
    case Format::PACKED_KV:
      decode_e4m3(row, exponents, plain_, kKvGroup, scratch);
      for (int64_t c = plain_; c < width_; ++c) {
        bf16 value;
        std::memcpy(&value, row + plain_ + (c - plain_) * 2, sizeof value);
        scratch[c] = to_float(value);
      }
      break;
    case Format::KEY_E4M3:
      decode_e4m3(row, exponents, width_, kIndexGroup, scratch);
      break;
    default:
      for (int64_t c = 0; c < width_; ++c) {
        scratch[c] = kE2m1[row[c / 2] >> (c % 2 * 4) & 15] * kE8m0[exponents[c / kIndexGroup]];
      }
  }
  return scratch;
}

void StateRows::write(int64_t i, int64_t j, const float* values) const {
  uint8_t* row = row_bytes(plane_, i, j);
  if (format_ == Format::FLOAT) {
    store_floats(values, plane_.dtype, width_, row);
    return;
  }
  uint8_t* exponents = row_bytes(scales_, i, j);
  // Padding is zero, so that saved state is the same bytes for the same tokens.
  std::memset(row, 0, static_cast<size_t>(plane_.size[2]));
  std::memset(exponents, 0, static_cast<size_t>(scales_.size[2]));
  const bool kv = format_ == Format::PACKED_KV;
  const int64_t group = kv ? kKvGroup : kIndexGroup;
  const int64_t scaled = kv ? plain_ : width_;
  for (int64_t start = 0; start < scaled; start += group) {
    const int64_t end = std::min(start + group, scaled);
    const uint8_t exponent =
        kv ? fp8_scale(values + start, end - start) : fp4_scale(values + start, end - start);
    const float inverse = inverse_scale(exponent);
    exponents[start / group] = exponent;
    for (int64_t c = start; c < end; ++c) {
      if (kv) {
        row[c] = encode_scaled_e4m3(values[c], inverse);
      } else {
        const uint8_t code = encode_scaled_e2m1(values[c], inverse);
        if (format_ == Format::KEY_E4M3) {
          row[c] = encode_e4m3(kE2m1[code]);
        } else {
          row[c / 2] = static_cast<uint8_t>(row[c / 2] | code << (c % 2 * 4));
        }
      }
    }
  }
  for (int64_t c = scaled; c < width_; ++c) {
    const bf16 value = to_bf16(values[c]);
    std::memcpy(row + scaled + (c - scaled) * 2, &value, sizeof value);
  }
}

StepRuns::StepRuns(const TensorView& slots, const TensorView& positions, int64_t slot_count) {
  const int32_t* slot = int_values(slots);
  const int32_t* position = int_values(positions);
  std::vector<int64_t> run_of_slot(static_cast<size_t>(slot_count), -1);
  for (int64_t row = 0; row < slots.size[0]; ++row) {
    int64_t& run = run_of_slot.at(static_cast<size_t>(slot[row]));
    if (run < 0) {
      run = static_cast<int64_t>(runs.size());
      runs.push_back({slot[row], position[row], {}});
    }
    std::vector<int64_t>& rows = runs[static_cast<size_t>(run)].rows;
    run_of_row.push_back(run);
    offset_of_row.push_back(static_cast<int64_t>(rows.size()));
    rows.push_back(row);
  }
}

}  // namespace dsv4c::cpu
