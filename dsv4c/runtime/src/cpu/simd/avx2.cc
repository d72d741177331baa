#include "cpu/simd/simd.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/simd/loops.h"

namespace dsv4c::cpu {

namespace {

// By code: twice the value of e2m1, the value of int4.
alignas(16) constexpr int8_t kE2m1Doubles[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kI4Values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileTokens = 2;
  static constexpr int kDirectSums = 8;

  static DSV4C_INLINE F zero() { return _mm256_setzero_ps(); }
  static DSV4C_INLINE F broadcast(float x) { return _mm256_set1_ps(x); }
  static DSV4C_INLINE F load(const float* x) { return _mm256_loadu_ps(x); }
  static DSV4C_INLINE void store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static DSV4C_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static DSV4C_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static DSV4C_INLINE __m128 fold(F x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  }
  static DSV4C_INLINE float sum(F x) {
    const __m128 four = fold(x);
    const __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
  }
  static DSV4C_INLINE void sum4(F a, F b, F c, F d, float* to) {
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
  }

  template <Encoding E>
  static DSV4C_INLINE F factor(float scale) {
    if constexpr (E == Encoding::E2M1) return _mm256_set1_ps(scale * 0.5f);
    if constexpr (E == Encoding::E4M3) return _mm256_set1_ps(scale * 256.0f);
    return _mm256_set1_ps(scale);
  }

  // The lower eight bytes as floats.
  static DSV4C_INLINE F from_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

  template <Encoding E>
  static DSV4C_INLINE void decode(const uint8_t* codes, F factor, F* to) {
    const auto* from = reinterpret_cast<const __m128i*>(codes);
    if constexpr (E == Encoding::F32) {
      for (int v = 0; v < 4; ++v) to[v] = _mm256_loadu_ps(reinterpret_cast<const float*>(codes) + 8 * v);
    } else if constexpr (E == Encoding::BF16) {
      for (int v = 0; v < 4; ++v) {
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from + v));
        to[v] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
      }
    } else if constexpr (E == Encoding::F16) {
      for (int v = 0; v < 4; ++v) to[v] = _mm256_cvtph_ps(_mm_loadu_si128(from + v));
    } else if constexpr (E == Encoding::E4M3) {
      // Seven bits up, the exponent and mantissa are those of a half of 2^-8 the value; bit 14 is a copy of the sign.
      for (int v = 0; v < 2; ++v) {
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(from + v)), 7);
        const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
        to[2 * v] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor);
        to[2 * v + 1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor);
      }
    } else if constexpr (E == Encoding::I8) {
      for (int v = 0; v < 4; ++v) {
        to[v] = _mm256_mul_ps(from_i8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * v))), factor);
      }
    } else {
      const __m128i table =
          _mm_load_si128(reinterpret_cast<const __m128i*>(E == Encoding::E2M1 ? kE2m1Doubles : kI4Values));
      const __m128i bytes = _mm_loadu_si128(from);
      const __m128i low = _mm_set1_epi8(15);
      const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, low));
      const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
      to[0] = _mm256_mul_ps(from_i8(even), factor);
      to[1] = _mm256_mul_ps(from_i8(_mm_srli_si128(even, 8)), factor);
      to[2] = _mm256_mul_ps(from_i8(odd), factor);
      to[3] = _mm256_mul_ps(from_i8(_mm_srli_si128(odd, 8)), factor);
    }
  }

  static DSV4C_INLINE F exponential(F x) {
    const F small = _mm256_cmp_ps(x, _mm256_set1_ps(-87.33654f), _CMP_LT_OQ);
    const F large = _mm256_cmp_ps(x, _mm256_set1_ps(88.72283f), _CMP_GT_OQ);
    const F n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f),
                                 _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x));
    F p = _mm256_set1_ps(kExp[0]);
    for (int i = 1; i < kExpTerms; ++i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp[i]));
    // In two steps: 2^128 is no float.
    const __m256i exponent = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(exponent, 1);
    p = _mm256_mul_ps(_mm256_mul_ps(p, power(half)), power(_mm256_sub_epi32(exponent, half)));
    p = _mm256_blendv_ps(p, _mm256_set1_ps(__builtin_inff()), large);
    return _mm256_andnot_ps(small, p);
  }
  static DSV4C_INLINE F power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

constexpr SimdKernels kKernels = Loops<Avx2>::kernels("avx2");

}  // namespace

const SimdKernels* avx2_kernels() { return &kKernels; }

}  // namespace dsv4c::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace dsv4c::cpu {

const SimdKernels* avx2_kernels() { return nullptr; }

}  // namespace dsv4c::cpu

#endif
