#include <cmath>

#include "cpu/formats.h"
#include "cpu/simd/loops.h"

namespace dsv4c::cpu {

namespace {

// Four lanes that every compiler for 64-bit processors keeps in a register.
struct Portable {
  typedef float F __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kTileTokens = 2;
  static constexpr int kDirectSums = 8;

  static DSV4C_INLINE F zero() { return F{}; }
  static DSV4C_INLINE F broadcast(float x) { return F{x, x, x, x}; }
  static DSV4C_INLINE F load(const float* x) {
    F value;
    std::memcpy(&value, x, sizeof value);
    return value;
  }
  static DSV4C_INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  static DSV4C_INLINE F add(F a, F b) { return a + b; }
  static DSV4C_INLINE F fma(F a, F b, F c) { return a * b + c; }

  static DSV4C_INLINE float sum(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
  static DSV4C_INLINE void sum4(F a, F b, F c, F d, float* to) {
    to[0] = sum(a);
    to[1] = sum(b);
    to[2] = sum(c);
    to[3] = sum(d);
  }

  template <Encoding E>
  static DSV4C_INLINE F factor(float scale) {
    return broadcast(scale);
  }

  // Column c of the chunk in the order that x has.
  template <Encoding E>
  static DSV4C_INLINE float value(const uint8_t* codes, int64_t c) {
    if constexpr (E == Encoding::F32) {
      float value;
      std::memcpy(&value, codes + 4 * c, sizeof value);
      return value;
    } else if constexpr (E == Encoding::BF16) {
      bf16 value;
      std::memcpy(&value, codes + 2 * c, sizeof value);
      return to_float(value);
    } else if constexpr (E == Encoding::F16) {
      uint16_t bits;
      std::memcpy(&bits, codes + 2 * c, sizeof bits);
      return decode_f16(bits);
    } else if constexpr (E == Encoding::E4M3) {
      return kE4m3[codes[c]];
    } else if constexpr (E == Encoding::I8) {
      return static_cast<float>(static_cast<int8_t>(codes[c]));
    } else {
      const uint32_t code = codes[c % 16] >> (c / 16 * 4) & 15;
      return E == Encoding::E2M1 ? kE2m1[code] : static_cast<float>(static_cast<int32_t>(code ^ 8) - 8);
    }
  }

  template <Encoding E>
  static DSV4C_INLINE void decode(const uint8_t* codes, F factor, F* to) {
    float values[kChunk];
    for (int64_t c = 0; c < kChunk; ++c) values[c] = value<E>(codes, c);
    for (int v = 0; v < kChunk / kLanes; ++v) {
      to[v] = load(values + v * kLanes);
      if constexpr (E != Encoding::F32 && E != Encoding::BF16 && E != Encoding::F16) to[v] *= factor;
    }
  }

  static DSV4C_INLINE F exponential(F x) { return F{std::exp(x[0]), std::exp(x[1]), std::exp(x[2]), std::exp(x[3])}; }
};

constexpr SimdKernels kKernels = Loops<Portable>::kernels("portable");

}  // namespace

const SimdKernels* portable_kernels() { return &kKernels; }

}  // namespace dsv4c::cpu
