#include "cpu/dot.h"

#include <cstring>

// One library for every x86-64: the loader takes the AVX2 version where the processor has it. The resolvers run
// before a sanitizer is ready, and clang before 14 has no target_clones; both get the plain version.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DSV4C_CPU_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define DSV4C_CPU_CLONES
#endif
#define DSV4C_INLINE inline __attribute__((always_inline))

namespace dsv4c::cpu {

namespace {

// Eight lanes on every machine: the compiler splits them where registers are shorter.
typedef float Lanes __attribute__((vector_size(32)));
constexpr int64_t kLanes = 8;

DSV4C_INLINE void load(const float* from, Lanes* to) { std::memcpy(to, from, sizeof *to); }

DSV4C_INLINE float sum_lanes(const Lanes* lanes) {
  const Lanes& l = *lanes;
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

// Two accumulators of eight lanes a row; ROWS rows share the loads of x.
template <int ROWS>
DSV4C_INLINE void dot_block(const float* weights, int64_t stride, const float* x, int64_t count, float* out) {
  Lanes sums[ROWS][2] = {};
  Lanes a, b, w;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    load(x + i, &a);
    load(x + i + kLanes, &b);
    for (int r = 0; r < ROWS; ++r) {
      load(weights + r * stride + i, &w);
      sums[r][0] += a * w;
      load(weights + r * stride + i + kLanes, &w);
      sums[r][1] += b * w;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float tail = 0;
    for (int64_t j = i; j < count; ++j) tail += weights[r * stride + j] * x[j];
    sums[r][0] += sums[r][1];
    out[r] = sum_lanes(&sums[r][0]) + tail;
  }
}

}  // namespace

DSV4C_CPU_CLONES void dot_rows(const float* weights, int64_t stride, int64_t rows, const float* x, int64_t count,
                               float* out) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) dot_block<4>(weights + row * stride, stride, x, count, out + row);
  for (; row < rows; ++row) dot_block<1>(weights + row * stride, stride, x, count, out + row);
}

DSV4C_CPU_CLONES void add_scaled_rows(const float* factors, int64_t rows, const float* x, int64_t count, float* y,
                                      int64_t stride) {
  Lanes a, b;
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = factors[r];
    float* target = y + r * stride;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      load(x + i, &a);
      load(target + i, &b);
      b += factor * a;
      std::memcpy(target + i, &b, sizeof b);
    }
    for (; i < count; ++i) target[i] += factor * x[i];
  }
}

}  // namespace dsv4c::cpu
