#include <array>
#include <atomic>

#include "cpu/simd/simd.h"

namespace dsv4c::cpu {

namespace {

struct Variants {
  std::array<const SimdKernels*, 4> list{};
  int count = 0;

  Variants() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2()) {
      add(avx512_kernels());
    }
    if (has_avx2()) add(avx2_kernels());
#endif
    add(neon_kernels());
    add(portable_kernels());
  }

#if defined(__x86_64__)
  // Every processor with AVX2 also converts halves (F16C).
  static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

  void add(const SimdKernels* kernels) {
    if (kernels != nullptr) list[static_cast<size_t>(count++)] = kernels;
  }
};

const Variants& variants() {
  static const Variants all;
  return all;
}

std::atomic<const SimdKernels*> chosen{nullptr};

}  // namespace

const SimdKernels& simd() {
  const SimdKernels* kernels = chosen.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    kernels = variants().list[0];
    chosen.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

const SimdKernels* const* simd_variants(int* count) {
  *count = variants().count;
  return variants().list.data();
}

void use_simd(const SimdKernels* variant) { chosen.store(variant, std::memory_order_relaxed); }

}  // namespace dsv4c::cpu
