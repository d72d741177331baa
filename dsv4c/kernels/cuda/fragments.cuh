// Rows of a stored matrix (weight.cuh) as operands of tensor cores.
//
// Tensor cores take the weights as A, 16 rows of the matrix to a tile, and up to 8 rows of x as B. The order of k
// within a sum is free as long as A and B agree, so that a lane reads 16 consecutive bytes of its rows: lane 4g + t of
// a warp has bytes 16t to 16t+15 of every 64 (a chunk) of rows g and g+8, and needs the same columns of x. It takes
// them in parts of 8 elements, each two products with 16 columns.
#pragma once

#include "mma.cuh"
#include "weight.cuh"

// 16 bytes.
struct __align__(16) Vector {
  u32 word[4];
};

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
#ifdef DSV4C_EMULATE
  return pack_bf16(emulated_bf16(a, 0) * emulated_bf16(b, 0), emulated_bf16(a, 1) * emulated_bf16(b, 1));
#else
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
#endif
}

// 2^(field - 127), twice.
__device__ __forceinline__ u32 power_pair(u32 field) { return field << 7 | field << 23; }

// How a lane's 16 bytes become operands. `decode` gives the elements of a part as four pairs, two for each product.
//   ELEMENTS       of 16 bytes
//   PAIRS_OF_FOUR  elements i and i + 4 of a part make a pair, else neighbours
//   PARTIAL        scales go onto the float32 sum over a chunk, else into decode, whose argument is their exponent
//   LARGEST        exponent up to which decode need not be LARGE
template <typename W>
struct Format {
  static constexpr int ELEMENTS = 16 / (int)sizeof(W);
  static constexpr bool PARTIAL = false, PAIRS_OF_FOUR = false;
};

template <>
struct Format<bf16> {
  static constexpr u32 LARGEST = 255;
  static constexpr int ELEMENTS = 8;
  static constexpr bool PARTIAL = false, PAIRS_OF_FOUR = false;
  template <bool LARGE>
  static __device__ __forceinline__ void decode(u32 (&pairs)[4], const Vector& v, int, u32) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = v.word[i];
  }
};

template <>
struct Format<e4m3> {
  static constexpr u32 LARGEST = 255;
  static constexpr int ELEMENTS = 16;
  static constexpr bool PARTIAL = true, PAIRS_OF_FOUR = false;
  // Sign and magnitude in the places of a bf16 are the value times 2^-120; both factors are exact in bf16.
  template <bool LARGE>
  static __device__ __forceinline__ void decode(u32 (&pairs)[4], const Vector& v, int part, u32) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 high = __byte_perm(v.word[part * 2 + i / 2], 0, i % 2 ? 0x3424 : 0x1404);  // codes in the high bytes
      pairs[i] = multiply_bf16x2((high & 0x80008000u) | (high >> 4 & 0x07F007F0u), power_pair(127 + 120));
    }
  }
};

template <>
struct Format<e2m1x2> {
  static constexpr int ELEMENTS = 32;
  // Elements i and i + 4 of a part make a pair: their codes are 16 bits apart.
  static constexpr bool PARTIAL = false, PAIRS_OF_FOUR = true;
  // Sign and magnitude in the places of a bf16 are the value times 2^-126. The products with that power and with the
  // scale are exact where the float32 product of value and scale is finite. One factor is both up to LARGEST.
  static constexpr u32 LARGEST = 128;
  template <bool LARGE>
  static __device__ __forceinline__ void decode(u32 (&pairs)[4], const Vector& v, int part, u32 scale) {
    const u32 w = v.word[part];
    pairs[0] = (w << 12 & 0x80008000u) | (w << 6 & 0x01C001C0u);
    pairs[1] = (w << 8 & 0x80008000u) | (w << 2 & 0x01C001C0u);
    pairs[2] = (w << 4 & 0x80008000u) | (w >> 2 & 0x01C001C0u);
    pairs[3] = (w & 0x80008000u) | (w >> 6 & 0x01C001C0u);
    const u32 power = power_pair((LARGE ? min(scale, LARGEST) : scale) + 126);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = multiply_bf16x2(pairs[i], power);
    if (LARGE) {
#pragma unroll
      for (int i = 0; i < 4; i++) pairs[i] = multiply_bf16x2(pairs[i], power_pair(max(scale, LARGEST) - LARGEST + 127));
    }
  }
};

typedef Format<W_TYPE> Weights;
constexpr int PARTS = Weights::ELEMENTS / 8;           // of a lane's 16 bytes
constexpr int CHUNK = 4 * Weights::ELEMENTS;           // columns of 64 bytes
constexpr int CHUNKS = (COLUMNS + CHUNK - 1) / CHUNK;  // of a row

// A prepared row of x (experts.cu) has CHUNKS * CHUNK columns, those past COLUMNS zero, in the order in which lanes
// take them: the parts of a chunk, of a part the lanes, of a lane the pairs. Where column k lies:
__device__ __forceinline__ int prepared_place(int k) {
  constexpr int ELEMENTS = Weights::ELEMENTS;
  const int in_chunk = k % CHUNK, in_part = in_chunk % 8;
  const int in_pair = Weights::PAIRS_OF_FOUR ? in_part % 4 * 2 + in_part / 4 : in_part;
  return k - in_chunk + in_chunk % ELEMENTS / 8 * 32 + in_chunk / ELEMENTS * 8 + in_pair;
}
