#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "dtype.h"

// The small number formats of weights and state. Decoding is exact; encoding rounds to nearest, ties to even.
namespace dsv4c::cpu {

inline constexpr float kFp8Max = 448.0f;
inline constexpr float kFp4Max = 6.0f;
// Smallest absolute maxima that the reference program quantises with.
inline constexpr float kFp8AmaxFloor = 1e-4f;
inline constexpr float kFp4AmaxFloor = 0x1.8p-124f;  // 6 * 2^-126

// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7F is NaN.
inline constexpr std::array<float, 256> kE4m3 = [] {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t sign = (code & 0x80) << 24;
    const uint32_t exponent = code >> 3 & 15;
    const uint32_t mantissa = code & 7;
    if ((code & 0x7F) == 0x7F) {
      values[code] = std::bit_cast<float>(sign | 0x7FC00000u);
    } else if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
      values[code] = sign ? -magnitude : magnitude;
    } else {
      values[code] = std::bit_cast<float>(sign | (exponent + 120) << 23 | mantissa << 20);
    }
  }
  return values;
}();

// An exponent: 2^(byte - 127); 255 is NaN.
inline constexpr std::array<float, 256> kE8m0 = [] {
  std::array<float, 256> values{};
  values[0] = 0x1p-127f;
  for (uint32_t code = 1; code < 255; ++code) values[code] = std::bit_cast<float>(code << 23);
  values[255] = std::numeric_limits<float>::quiet_NaN();
  return values;
}();

inline constexpr std::array<float, 16> kE2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

inline float decode_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31;
  const uint32_t mantissa = bits & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t encode_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (magnitude < 0x38800000) {  // below 2^-14: the last place of 0.5 + x is that of a subnormal
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = (magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  return static_cast<uint16_t>(sign | std::min<uint32_t>(rounded - (112u << 10), 0x7C00));
}

inline uint8_t encode_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint8_t>(sign | 0x7F);
  if (magnitude < 0x3C800000) {  // below 2^-6: the last place of 2^14 + x is that of a subnormal, 2^-9
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f);
    return static_cast<uint8_t>(sign | (sum - std::bit_cast<uint32_t>(0x1p14f)));
  }
  const uint32_t rounded = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
  return static_cast<uint8_t>(sign | std::min<uint32_t>(rounded - (120u << 3), 0x7F));
}

// Each comparison is the midpoint below a code; an even code takes the tie, an odd one does not.
inline uint8_t encode_e2m1(float value) {
  const float magnitude = std::fabs(value);
  const int code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                   (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

// The byte of 2^ceil(log2(amax / limit)), from the bits: a logarithm is off by one near powers of two.
// The floors above keep the quotient a normal number.
inline uint8_t scale_exponent(float amax, float limit) {
  const uint32_t bits = std::bit_cast<uint32_t>(amax / limit);
  return static_cast<uint8_t>(std::clamp<uint32_t>((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 253));
}

// 1 / scale of a byte of `scale_exponent`, exact: multiplying by it is dividing by the scale.
inline float inverse_scale(uint8_t exponent) { return kE8m0[254 - exponent]; }

inline float absolute_maximum(const float* x, int64_t count, float floor) {
  float amax = floor;
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

inline uint8_t fp8_scale(const float* x, int64_t count) {
  return scale_exponent(absolute_maximum(x, count, kFp8AmaxFloor), kFp8Max);
}

inline uint8_t fp4_scale(const float* x, int64_t count) {
  return scale_exponent(absolute_maximum(x, count, kFp4AmaxFloor), kFp4Max);
}

inline uint8_t encode_scaled_e4m3(float value, float inverse) {
  return encode_e4m3(std::clamp(value * inverse, -kFp8Max, kFp8Max));
}

inline uint8_t encode_scaled_e2m1(float value, float inverse) {
  return encode_e2m1(std::clamp(value * inverse, -kFp4Max, kFp4Max));
}

}  // namespace dsv4c::cpu
