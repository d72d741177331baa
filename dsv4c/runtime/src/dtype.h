#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace dsv4c {

// Codes as in the engine file.
enum class DType : uint32_t {
  F32 = 1,
  BF16 = 2,
  F16 = 3,
  F8E4M3 = 4,
  F8E8M0 = 5,  // an exponent: 2^(byte - 127)
  U8 = 6,
  I8 = 7,
  I32 = 8,
  I64 = 9,
  F4E2M1X2 = 10,  // two e2m1 codes a byte, the lower nibble first; sizes and strides count bytes
};

constexpr bool is_dtype(uint32_t code) { return code >= 1 && code <= 10; }

constexpr int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::I64:
      return 8;
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::BF16:
    case DType::F16:
      return 2;
    default:
      return 1;
  }
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return "float32";
    case DType::BF16:
      return "bfloat16";
    case DType::F16:
      return "float16";
    case DType::F8E4M3:
      return "float8_e4m3";
    case DType::F8E8M0:
      return "float8_e8m0";
    case DType::U8:
      return "uint8";
    case DType::I8:
      return "int8";
    case DType::I32:
      return "int32";
    case DType::I64:
      return "int64";
    case DType::F4E2M1X2:
      return "float4_e2m1x2";
  }
  return "?";
}

// A type of its own, so that no integer is read as a bfloat16 by mistake.
struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(float value) { return value; }

// Nearest, ties to even; a NaN stays a NaN (its low bits could otherwise carry into the exponent).
inline bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace dsv4c
