#pragma once

#include <cstdint>

// The inner loops, once per instruction set; the best one that the processor has is chosen at run time.
//
// A result has one order of summation within a variant: lane i of one accumulator takes columns i, i + lanes, ... with
// a fused multiply-add where the variant has one. So it depends neither on the results computed beside it nor on how
// the loops are blocked, which differ with the number of rows.
namespace dsv4c::cpu {

// Columns that the loops over stored weights take at a time.
constexpr int64_t kChunk = 32;
// Most weight rows of one call.
constexpr int64_t kBlockRows = 8;

enum class Encoding : uint32_t { F32, BF16, F16, E4M3, E2M1, I8, I4 };

constexpr int64_t chunk_bytes(Encoding encoding) {
  switch (encoding) {
    case Encoding::F32:
      return kChunk * 4;
    case Encoding::BF16:
    case Encoding::F16:
      return kChunk * 2;
    case Encoding::E4M3:
    case Encoding::I8:
      return kChunk;
    default:
      return kChunk / 2;
  }
}

// Two codes a byte: a chunk decodes to its even columns, then its odd ones, and x comes in that order.
constexpr bool is_packed(Encoding encoding) { return encoding == Encoding::E2M1 || encoding == Encoding::I4; }

// Largest scale of e4m3 codes: they are decoded as halves of 1/256 the value, for which the scale makes up.
constexpr float kMaxE4m3Scale = 0x1p119f;

// Consecutive rows of a stored matrix.
struct StoredRows {
  Encoding encoding = Encoding::F32;
  const uint8_t* codes = nullptr;  // of the first row
  int64_t row_bytes = 0;           // from one row to the next
  const float* scales = nullptr;   // of the first row, one per group of columns; null where there are none
  int64_t scale_stride = 0;        // from the scales of one row to those of the next
  int64_t group = kChunk;          // columns, a multiple of kChunk
};

struct SimdKernels {
  const char* name;

  // out[t * out_stride + r] = sum_c weight[r, c] * x[t][c], for at most kBlockRows rows. For a packed encoding the rows
  // of x are in chunk order (`is_packed`) and padded with zeros to a multiple of kChunk.
  void (*project)(const StoredRows& weight, int64_t rows, int64_t columns, const float* const* x, int64_t tokens,
                  float* out, int64_t out_stride);

  // sums[h * columns + c] += sum_i factors[i * heads + h] * rows[i][c], i ascending.
  void (*add_weighted)(const float* factors, int64_t heads, const float* const* rows, int64_t count, int64_t columns,
                       float* sums);

  float (*dot)(const float* a, const float* b, int64_t count);

  // x[i] = exp(x[i]) within 2 units in the last place; results below the normal numbers are 0.
  void (*exponentials)(float* x, int64_t count);

  // Float32 scales of half-precision ones and of exponents (2^(byte - 127), 255 is NaN).
  void (*expand_f16)(const uint16_t* from, int64_t count, float* to);
  void (*expand_e8m0)(const uint8_t* from, int64_t count, float* to);
};

// The variant in use.
const SimdKernels& simd();

// For tests: the variants that this processor runs, best first, and the choice of one; null for the best.
const SimdKernels* const* simd_variants(int* count);
void use_simd(const SimdKernels* variant);

// Each is null where the compiler has no such instructions.
const SimdKernels* avx512_kernels();
const SimdKernels* avx2_kernels();
const SimdKernels* neon_kernels();
const SimdKernels* portable_kernels();

}  // namespace dsv4c::cpu
