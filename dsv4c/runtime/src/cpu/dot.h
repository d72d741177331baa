#pragma once

#include <cstdint>

// The inner loops. Each result has one order of summation, whatever is computed beside it.
namespace dsv4c::cpu {

// out[r] = sum_i weights[r * stride + i] * x[i] for `rows` rows.
void dot_rows(const float* weights, int64_t stride, int64_t rows, const float* x, int64_t count, float* out);

// y[r * stride + i] += factors[r] * x[i] for `rows` rows.
void add_scaled_rows(const float* factors, int64_t rows, const float* x, int64_t count, float* y, int64_t stride);

inline float dot(const float* a, const float* b, int64_t count) {
  float result;
  dot_rows(a, count, 1, b, count, &result);
  return result;
}

}  // namespace dsv4c::cpu
