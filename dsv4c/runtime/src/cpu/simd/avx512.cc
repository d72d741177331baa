#include "cpu/simd/simd.h"

#if defined(__x86_64__)

// GCC 12 takes the undefined operands inside its own intrinsics for uninitialised variables (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

#include "cpu/simd/loops.h"

namespace dsv4c::cpu {

namespace {

// Two results of one byte, by its halves: the sixteen values of a code, in order.
alignas(64) constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
alignas(64) constexpr float kI4Values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTileTokens = 4;
  static constexpr int kDirectSums = 16;

  static DSV4C_INLINE F zero() { return _mm512_setzero_ps(); }
  static DSV4C_INLINE F broadcast(float x) { return _mm512_set1_ps(x); }
  static DSV4C_INLINE F load(const float* x) { return _mm512_loadu_ps(x); }
  static DSV4C_INLINE void store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static DSV4C_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static DSV4C_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static DSV4C_INLINE __m128 fold(F x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  static DSV4C_INLINE float sum(F x) {
    const __m128 four = fold(x);
    const __m128 two = _mm_hadd_ps(four, four);
    return _mm_cvtss_f32(_mm_hadd_ps(two, two));
  }
  static DSV4C_INLINE void sum4(F a, F b, F c, F d, float* to) {
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
  }

  // For packed codes the sixteen scaled values.
  template <Encoding E>
  static DSV4C_INLINE F factor(float scale) {
    if constexpr (E == Encoding::E2M1) return _mm512_mul_ps(_mm512_load_ps(kE2m1Values), _mm512_set1_ps(scale));
    if constexpr (E == Encoding::I4) return _mm512_mul_ps(_mm512_load_ps(kI4Values), _mm512_set1_ps(scale));
    if constexpr (E == Encoding::E4M3) return _mm512_set1_ps(scale * 256.0f);
    return _mm512_set1_ps(scale);
  }

  template <Encoding E>
  static DSV4C_INLINE void decode(const uint8_t* codes, F factor, F* to) {
    const auto* from = reinterpret_cast<const __m256i*>(codes);
    if constexpr (E == Encoding::F32) {
      to[0] = _mm512_loadu_ps(codes);
      to[1] = _mm512_loadu_ps(codes + 64);
    } else if constexpr (E == Encoding::BF16) {
      for (int v = 0; v < 2; ++v) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from + v));
        to[v] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
      }
    } else if constexpr (E == Encoding::F16) {
      for (int v = 0; v < 2; ++v) to[v] = _mm512_cvtph_ps(_mm256_loadu_si256(from + v));
    } else if constexpr (E == Encoding::E4M3) {
      // Seven bits up, the exponent and mantissa are those of a half of 2^-8 the value; bit 14 is a copy of the sign.
      const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from)), 7);
      const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0xBF80)));
      to[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor);
      to[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor);
    } else if constexpr (E == Encoding::I8) {
      const auto* bytes = reinterpret_cast<const __m128i*>(codes);
      for (int v = 0; v < 2; ++v) {
        to[v] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + v))), factor);
      }
    } else {
      // The permutation looks at the low four bits of a lane.
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
      to[0] = _mm512_permutexvar_ps(bytes, factor);
      to[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), factor);
    }
  }

  static DSV4C_INLINE F exponential(F x) {
    const __mmask16 small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_LT_OQ);
    const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(88.72283f), _CMP_GT_OQ);
    const F n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    const F r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f),
                                 _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x));
    F p = _mm512_set1_ps(kExp[0]);
    for (int i = 1; i < kExpTerms; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp[i]));
    p = _mm512_scalef_ps(p, n);
    p = _mm512_mask_blend_ps(large, p, _mm512_set1_ps(__builtin_inff()));
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(~small), p);
  }
};

constexpr SimdKernels kKernels = Loops<Avx512>::kernels("avx512");

}  // namespace

const SimdKernels* avx512_kernels() { return &kKernels; }

}  // namespace dsv4c::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace dsv4c::cpu {

const SimdKernels* avx512_kernels() { return nullptr; }

}  // namespace dsv4c::cpu

#endif
