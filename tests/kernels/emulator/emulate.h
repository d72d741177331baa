// CUDA C++ as the kernels use it, for the host's compiler: a kernel's source compiled behind this header runs on the
// CPU (grid.cc). What is missing here is added here; instructions without a C form have branches for DSV4C_EMULATE in
// dsv4c/kernels/cuda/{mma,async}.cuh, those of Hopper functions in hopper_emulated.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "device.h"

#define DSV4C_EMULATE 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __restrict__ __restrict
// One block runs at a time, so that shared memory can be static; its section lets grid.cc poison it, and put it aside
// while another block runs.
#define __shared__ static __attribute__((section("dsv4c_shared")))

#define threadIdx (emulate::thread_index)
#define blockIdx (emulate::block_index)
#define blockDim (emulate::block_size)
#define gridDim (emulate::grid_size)
constexpr int warpSize = 32;

#define EMULATE_VECTOR(type, name, align2, align4)                                             \
  struct name##1 { type x; };                                                                  \
  struct alignas(align2) name##2 { type x, y; };                                               \
  struct name##3 { type x, y, z; };                                                            \
  struct alignas(align4) name##4 { type x, y, z, w; };                                         \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                             \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                  \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATE_VECTOR(signed char, char, 2, 4)
EMULATE_VECTOR(unsigned char, uchar, 2, 4)
EMULATE_VECTOR(short, short, 4, 8)
EMULATE_VECTOR(unsigned short, ushort, 4, 8)
EMULATE_VECTOR(int, int, 8, 16)
EMULATE_VECTOR(unsigned int, uint, 8, 16)
EMULATE_VECTOR(long long, longlong, 16, 16)
EMULATE_VECTOR(unsigned long long, ulonglong, 16, 16)
EMULATE_VECTOR(float, float, 8, 16)
EMULATE_VECTOR(double, double, 16, 16)
#undef EMULATE_VECTOR

// Barriers and warp functions. The default argument is the caller's line, for errors.
inline void __syncthreads(int line = __builtin_LINE()) { emulate::block_barrier(false, "__syncthreads", line); }
inline int __syncthreads_count(int vote, int line = __builtin_LINE()) {
  return (int)emulate::block_barrier(vote != 0, "__syncthreads_count", line);
}
inline int __syncthreads_or(int vote, int line = __builtin_LINE()) {
  return emulate::block_barrier(vote != 0, "__syncthreads_or", line) != 0;
}
inline int __syncthreads_and(int vote, int line = __builtin_LINE()) {
  return emulate::block_barrier(vote != 0, "__syncthreads_and", line) == emulate::block_size.x;
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  emulate::exchange(mask, 0, "__syncwarp", line);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, value, "__shfl_sync", line);
  const int first = (int)emulate::lane() & ~(width - 1);
  return emulate::slot<T>(slots, first + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, value, "__shfl_xor_sync", line);
  const int lane = (int)emulate::lane(), other = lane ^ lanes;
  return emulate::slot<T>(slots, other < (lane & ~(width - 1)) + width ? other : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, value, "__shfl_down_sync", line);
  const int lane = (int)emulate::lane(), other = lane + (int)delta;
  return emulate::slot<T>(slots, other < (lane & ~(width - 1)) + width ? other : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, value, "__shfl_up_sync", line);
  const int lane = (int)emulate::lane(), other = lane - (int)delta;
  return emulate::slot<T>(slots, other >= (lane & ~(width - 1)) ? other : lane);
}
inline unsigned __ballot_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, vote, "__ballot_sync", line);
  unsigned votes = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const unsigned lane = __builtin_ctz(rest);
    votes |= (unsigned)(emulate::slot<int>(slots, lane) != 0) << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  return __ballot_sync(mask, vote, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  return __ballot_sync(mask, vote, line) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  const auto* slots = emulate::exchange(mask, value, "__match_any_sync", line);
  unsigned same = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const unsigned lane = __builtin_ctz(rest);
    same |= (unsigned)(emulate::slot<T>(slots, lane) == value) << lane;
  }
  return same;
}
inline unsigned __activemask() { return ~0u; }

namespace emulate {
template <typename T, typename F>
T reduce(unsigned mask, T value, const char* what, int line, F combine) {
  const auto* slots = exchange(mask, value, what, line);
  T result = slot<T>(slots, __builtin_ctz(mask));
  for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1)
    result = combine(result, slot<T>(slots, __builtin_ctz(rest)));
  return result;
}
}  // namespace emulate
#define EMULATE_REDUCE(name, type, expression)                                          \
  inline type name(unsigned mask, type value, int line = __builtin_LINE()) {            \
    return emulate::reduce(mask, value, #name, line, [](type a, type b) -> type { return expression; }); \
  }
EMULATE_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATE_REDUCE(__reduce_add_sync, int, a + b)
EMULATE_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATE_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATE_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATE_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATE_REDUCE(__reduce_and_sync, unsigned, a & b)
EMULATE_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATE_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMULATE_REDUCE

// Atomics: threads change places only at barriers and warp functions.
template <typename T>
T atomicExch(T* place, T value) {
  const T old = *place;
  *place = value;
  return old;
}
template <typename T>
T atomicAdd(T* place, T value) { return atomicExch(place, (T)(*place + value)); }
template <typename T>
T atomicSub(T* place, T value) { return atomicExch(place, (T)(*place - value)); }
template <typename T>
T atomicMax(T* place, T value) { return atomicExch(place, *place > value ? *place : value); }
template <typename T>
T atomicMin(T* place, T value) { return atomicExch(place, *place < value ? *place : value); }
template <typename T>
T atomicOr(T* place, T value) { return atomicExch(place, (T)(*place | value)); }
template <typename T>
T atomicAnd(T* place, T value) { return atomicExch(place, (T)(*place & value)); }
template <typename T>
T atomicXor(T* place, T value) { return atomicExch(place, (T)(*place ^ value)); }
template <typename T>
T atomicCAS(T* place, T expected, T value) { return atomicExch(place, *place == expected ? value : *place); }
inline unsigned atomicInc(unsigned* place, unsigned limit) {
  return atomicExch(place, *place >= limit ? 0u : *place + 1);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned, int line = __builtin_LINE()) { emulate::pause("__nanosleep", line); }

// Loads and stores with a cache hint.
template <typename T> T __ldg(const T* place) { return *place; }
template <typename T> T __ldcg(const T* place) { return *place; }
template <typename T> T __ldca(const T* place) { return *place; }
template <typename T> T __ldcs(const T* place) { return *place; }
template <typename T> T __ldlu(const T* place) { return *place; }
template <typename T> T __ldcv(const T* place) { return *place; }
template <typename T> void __stcg(T* place, T value) { *place = value; }
template <typename T> void __stcs(T* place, T value) { *place = value; }
template <typename T> void __stwb(T* place, T value) { *place = value; }
template <typename T> void __stwt(T* place, T value) { *place = value; }

// Mathematics. The fast functions are the exact ones here.
using std::isfinite;
using std::isinf;
using std::isnan;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float rsqrtf(float x) { return (float)(1.0 / std::sqrt((double)x)); }
inline float exp10f(float x) { return (float)std::pow(10.0, (double)x); }
inline void sincospif(float x, float* s, float* c) {
  *s = (float)std::sin(M_PI * (double)x);
  *c = (float)std::cos(M_PI * (double)x);
}
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// Conversions and bits.
namespace emulate {
template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
}  // namespace emulate
inline float __int_as_float(int x) { return emulate::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return emulate::bits_as<float>(x); }
inline int __float_as_int(float x) { return emulate::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return emulate::bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emulate::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return emulate::bits_as<long long>(x); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)std::floor(x); }
inline int __float2int_ru(float x) { return (int)std::ceil(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)std::nearbyint(x); }
inline unsigned __float2uint_rz(float x) { return (unsigned)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> (4 * i) & 15u;
    unsigned byte = (unsigned)(bytes >> (8 * (nibble & 7u))) & 0xFFu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline void __trap() {
  emulate::report("thread %u: __trap()", emulate::current);
  emulate::stop();
}
inline void __assume(bool) {}
