#include "cpu/simd/simd.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include "cpu/simd/loops.h"

namespace dsv4c::cpu {

namespace {

// By code: twice the value of e2m1, the value of int4.
alignas(16) constexpr int8_t kE2m1Doubles[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kI4Values[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

struct Neon {
  using F = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kTileTokens = 4;
  static constexpr int kDirectSums = 16;

  static DSV4C_INLINE F zero() { return vdupq_n_f32(0); }
  static DSV4C_INLINE F broadcast(float x) { return vdupq_n_f32(x); }
  static DSV4C_INLINE F load(const float* x) { return vld1q_f32(x); }
  static DSV4C_INLINE void store(float* to, F x) { vst1q_f32(to, x); }
  static DSV4C_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
  static DSV4C_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

  static DSV4C_INLINE float sum(F x) {
    const F two = vpaddq_f32(x, x);
    return vgetq_lane_f32(vpaddq_f32(two, two), 0);
  }
  static DSV4C_INLINE void sum4(F a, F b, F c, F d, float* to) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }

  template <Encoding E>
  static DSV4C_INLINE F factor(float scale) {
    if constexpr (E == Encoding::E2M1) return vdupq_n_f32(scale * 0.5f);
    if constexpr (E == Encoding::E4M3) return vdupq_n_f32(scale * 256.0f);
    return vdupq_n_f32(scale);
  }

  // Sixteen bytes as floats, scaled.
  static DSV4C_INLINE void from_i8(int8x16_t bytes, F factor, F* to) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    to[0] = vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), factor);
    to[1] = vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(low)), factor);
    to[2] = vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), factor);
    to[3] = vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(high)), factor);
  }

  static DSV4C_INLINE void from_f16(uint16x8_t bits, F* to) {
    const float16x8_t halves = vreinterpretq_f16_u16(bits);
    to[0] = vcvt_f32_f16(vget_low_f16(halves));
    to[1] = vcvt_high_f32_f16(halves);
  }

  template <Encoding E>
  static DSV4C_INLINE void decode(const uint8_t* codes, F factor, F* to) {
    const auto* words = reinterpret_cast<const uint16_t*>(codes);
    const auto* bytes = reinterpret_cast<const int8_t*>(codes);
    if constexpr (E == Encoding::F32) {
      for (int v = 0; v < 8; ++v) to[v] = vld1q_f32(reinterpret_cast<const float*>(codes) + 4 * v);
    } else if constexpr (E == Encoding::BF16) {
      for (int v = 0; v < 4; ++v) {
        const uint16x8_t bits = vld1q_u16(words + 8 * v);
        to[2 * v] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
        to[2 * v + 1] = vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
      }
    } else if constexpr (E == Encoding::F16) {
      for (int v = 0; v < 4; ++v) from_f16(vld1q_u16(words + 8 * v), to + 2 * v);
    } else if constexpr (E == Encoding::E4M3) {
      // Seven bits up, the exponent and mantissa are those of a half of 2^-8 the value; bit 14 is a copy of the sign.
      const uint16x8_t mask = vdupq_n_u16(0xBF80);
      for (int v = 0; v < 2; ++v) {
        const int8x16_t part = vld1q_s8(bytes + 16 * v);
        from_f16(vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(part), 7)), mask), to + 4 * v);
        from_f16(vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(part, 7)), mask), to + 4 * v + 2);
      }
      for (int v = 0; v < 8; ++v) to[v] = vmulq_f32(to[v], factor);
    } else if constexpr (E == Encoding::I8) {
      for (int v = 0; v < 2; ++v) from_i8(vld1q_s8(bytes + 16 * v), factor, to + 4 * v);
    } else {
      const int8x16_t table = vld1q_s8(E == Encoding::E2M1 ? kE2m1Doubles : kI4Values);
      const uint8x16_t pairs = vld1q_u8(codes);
      from_i8(vqtbl1q_s8(table, vandq_u8(pairs, vdupq_n_u8(15))), factor, to);
      from_i8(vqtbl1q_s8(table, vshrq_n_u8(pairs, 4)), factor, to + 4);
    }
  }

  static DSV4C_INLINE F exponential(F x) {
    const uint32x4_t small = vcltq_f32(x, vdupq_n_f32(-87.33654f));
    const uint32x4_t large = vcgtq_f32(x, vdupq_n_f32(88.72283f));
    const F n = vrndnq_f32(vmulq_f32(x, vdupq_n_f32(1.44269504f)));
    const F r = vfmsq_f32(vfmsq_f32(x, n, vdupq_n_f32(0.693145752f)), n, vdupq_n_f32(1.42860677e-6f));
    F p = vdupq_n_f32(kExp[0]);
    for (int i = 1; i < kExpTerms; ++i) p = vfmaq_f32(vdupq_n_f32(kExp[i]), p, r);
    // In two steps: 2^128 is no float.
    const int32x4_t exponent = vcvtq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(exponent, 1);
    p = vmulq_f32(vmulq_f32(p, power(half)), power(vsubq_s32(exponent, half)));
    p = vbslq_f32(large, vdupq_n_f32(__builtin_inff()), p);
    return vbslq_f32(small, vdupq_n_f32(0), p);
  }
  static DSV4C_INLINE F power(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
};

constexpr SimdKernels kKernels = Loops<Neon>::kernels("neon");

}  // namespace

const SimdKernels* neon_kernels() { return &kKernels; }

}  // namespace dsv4c::cpu

#else

namespace dsv4c::cpu {

const SimdKernels* neon_kernels() { return nullptr; }

}  // namespace dsv4c::cpu

#endif
