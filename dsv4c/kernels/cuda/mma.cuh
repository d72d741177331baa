// Tensor-core products of one warp and the loads of their operands. All 32 lanes take part.
//
// Fragments of m16n8k16, with g = lane / 4 and t = lane % 4; a register holds two bf16, the lower column (A) or row (B)
// in the low half:
//   A [16, 16]: a[0] row g, columns 2t, 2t+1; a[1] row g+8; a[2] row g, columns 2t+8, 2t+9; a[3] row g+8, those columns
//   B [16, 8]:  b[0] rows 2t, 2t+1, column g; b[1] rows 2t+8, 2t+9
//   D [16, 8]:  d[0], d[1] row g, columns 2t, 2t+1; d[2], d[3] row g+8
#pragma once

#include "dtype.cuh"
#include "shared_address.cuh"

#ifdef DSV4C_EMULATE
struct EmulatedOperands {
  u32 a[4];
  u32 b[2];
  float d[4];
};

// Element `half` of a register with two bf16.
inline float emulated_bf16(u32 pair, int half) { return bits_to_float(half ? pair & 0xFFFF0000u : pair << 16); }

// The product of a warp, whose lanes have put their operands into slots.
inline void emulated_product(emulate::Slot* slots) {
  float a[16][16], b[16][8], d[16][8] = {};
  for (int lane = 0; lane < 32; lane++) {
    const EmulatedOperands from = emulate::slot<EmulatedOperands>(slots, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; i++)
      a[g + i / 2 % 2 * 8][2 * t + i / 4 * 8 + i % 2] = emulated_bf16(from.a[i / 2], i % 2);
    for (int i = 0; i < 4; i++) b[2 * t + i / 2 * 8 + i % 2][g] = emulated_bf16(from.b[i / 2], i % 2);
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; lane++) {
    EmulatedOperands result = emulate::slot<EmulatedOperands>(slots, lane);
    for (int i = 0; i < 4; i++) result.d[i] += d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    __builtin_memcpy(slots[lane], &result, sizeof result);
  }
}

// Loads of a warp, whose lanes have put their addresses into slots: registers for all of them.
inline void emulated_load(emulate::Slot* slots, int count, bool transposed, int line) {
  const u16* rows[32];
  for (int lane = 0; lane < 8 * count; lane++) {
    rows[lane] = emulate::slot<const u16*>(slots, lane);
    if ((u64)rows[lane] % 16 == 0) continue;
    emulate::report("ldmatrix at line %d: the address of lane %d is not aligned to 16 bytes", line, lane);
    emulate::stop();
  }
  for (int lane = 0; lane < 32; lane++) {
    u16 pairs[4][2] = {};
    for (int matrix = 0; matrix < count; matrix++)
      for (int i = 0; i < 2; i++) {
        const int outer = lane / 4, inner = lane % 4 * 2 + i;
        pairs[matrix][i] = transposed ? rows[8 * matrix + inner][outer] : rows[8 * matrix + outer][inner];
      }
    __builtin_memcpy(slots[lane], pairs, sizeof pairs);
  }
}

inline void emulated_ldmatrix(u32* registers, int count, bool transposed, const void* row, int line) {
  const auto* slots = emulate::exchange(~0u, row, "ldmatrix", line, [=](emulate::Slot* slots) {
    emulated_load(slots, count, transposed, line);
  });
  __builtin_memcpy(registers, slots[emulate::lane()], 4 * count);
}
#define EMULATED_LINE , int line = __builtin_LINE()
#else
#define EMULATED_LINE
#endif

// d += a * b with bf16 operands and float32 sums.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4],
                                                  const u32 (&b)[2] EMULATED_LINE) {
#ifdef DSV4C_EMULATE
  const EmulatedOperands own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
  const auto* slots = emulate::exchange(~0u, own, "mma_m16n8k16_bf16", line, emulated_product);
  const EmulatedOperands result = emulate::slot<EmulatedOperands>(slots, emulate::lane());
  for (int i = 0; i < 4; i++) d[i] = result.d[i];
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Matrices of 8 rows of 8 two-byte elements in shared memory: lane i gives the address of row i % 8 of matrix i / 8, on
// a multiple of 16 bytes. registers[m] gets row lane / 4, columns 2 * (lane % 4) and the next, of matrix m; transposed,
// rows 2 * (lane % 4) and the next of column lane / 4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&registers)[4], const void* row EMULATED_LINE) {
#ifdef DSV4C_EMULATE
  emulated_ldmatrix(registers, 4, false, row, line);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&registers)[4], const void* row EMULATED_LINE) {
#ifdef DSV4C_EMULATE
  emulated_ldmatrix(registers, 4, true, row, line);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// Two matrices: the addresses of lanes 0 to 15 count.
__device__ __forceinline__ void ldmatrix_x2(u32 (&registers)[2], const void* row EMULATED_LINE) {
#ifdef DSV4C_EMULATE
  emulated_ldmatrix(registers, 2, false, row, line);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&registers)[2], const void* row EMULATED_LINE) {
#ifdef DSV4C_EMULATE
  emulated_ldmatrix(registers, 2, true, row, line);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}
