#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/formats.h"
#include "cpu/simd/simd.h"

// The row-wise formulas that several kernels share, in place on float32; the caller rounds.
namespace dsv4c::cpu {

inline float reciprocal_rms(const float* x, int64_t width, float eps) {
  return 1.0f / std::sqrt(simd().dot(x, x, width) / static_cast<float>(width) + eps);
}

// `weight` may be null.
inline void normalize_row(float* x, const float* weight, int64_t width, float eps) {
  const float scale = reciprocal_rms(x, width, eps);
  for (int64_t i = 0; i < width; ++i) x[i] *= scale;
  if (weight == nullptr) return;
  for (int64_t i = 0; i < width; ++i) x[i] *= weight[i];
}

// Cosine and sine of position * inv_freq, [half] each.
inline void rotation(int64_t position, const float* inv_freq, int64_t half, float* cosine, float* sine) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    cosine[i] = std::cos(angle);
    sine[i] = std::sin(angle);
  }
}

// Interleaved pairs of the last 2 * half channels.
inline void rotate_row(float* x, int64_t width, const float* cosine, const float* sine, int64_t half) {
  float* tail = x + width - 2 * half;
  for (int64_t i = 0; i < half; ++i) {
    const float even = tail[2 * i], odd = tail[2 * i + 1];
    tail[2 * i] = even * cosine[i] - odd * sine[i];
    tail[2 * i + 1] = odd * cosine[i] + even * sine[i];
  }
}

// Walsh-Hadamard transform times width^-0.5; the width is a power of two.
inline void hadamard_row(float* x, int64_t width) {
  for (int64_t span = 1; span < width; span *= 2) {
    for (int64_t start = 0; start < width; start += 2 * span) {
      for (int64_t i = start; i < start + span; ++i) {
        const float a = x[i], b = x[i + span];
        x[i] = a + b;
        x[i + span] = a - b;
      }
    }
  }
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
  for (int64_t i = 0; i < width; ++i) x[i] *= scale;
}

inline void fp8_round_row(float* x, int64_t width, int64_t group) {
  for (int64_t start = 0; start < width; start += group) {
    const int64_t count = std::min(group, width - start);
    const uint8_t exponent = fp8_scale(x + start, count);
    const float scale = kE8m0[exponent], inverse = inverse_scale(exponent);
    for (int64_t i = start; i < start + count; ++i) x[i] = kE4m3[encode_scaled_e4m3(x[i], inverse)] * scale;
  }
}

inline void fp4_round_row(float* x, int64_t width, int64_t group) {
  for (int64_t start = 0; start < width; start += group) {
    const int64_t count = std::min(group, width - start);
    const uint8_t exponent = fp4_scale(x + start, count);
    const float scale = kE8m0[exponent], inverse = inverse_scale(exponent);
    for (int64_t i = start; i < start + count; ++i) x[i] = kE2m1[encode_scaled_e2m1(x[i], inverse)] * scale;
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// silu(min(gate, limit)) * clamp(up, -limit, limit)
inline void clamped_swiglu_row(const float* gate, const float* up, int64_t count, float limit, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = -std::min(gate[i], limit);
  simd().exponentials(to, count);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = std::min(gate[i], limit) / (1.0f + to[i]) * std::clamp(up[i], -limit, limit);
  }
}

}  // namespace dsv4c::cpu
