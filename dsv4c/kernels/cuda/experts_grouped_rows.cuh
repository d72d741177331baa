// The rows of weights that a warp multiplies: from a stage of the ring to registers of the tensor cores.
//
// Of each 128 columns a warp decodes its rows into registers and multiplies them in the tensor cores; the sums of these
// columns are then scaled and added in float32. FP4 has a scale for each row and 32 columns. With few pairs the sums of
// each 32 columns are kept apart and scaled. With many that would take longer than to put the scales into the decoded
// numbers: a code times 2^-11 to 2^0 is an e4m3 number, so that a row keeps one unit for all of its sums as long as its
// scales are within that range of it (`RowUnits`).
#pragma once

#include "experts_grouped.cuh"

constexpr int MOST_SEPARATE = 32;  // pairs
template <int N>
constexpr bool SEPARATE_SCALES = !FP8 && N <= MOST_SEPARATE;

// A panel's 128 columns are multiplied in parts. Sums of the tensor cores keep some 14 bits: the more products they add
// up, the less is left of each.
constexpr int PART_BLOCKS = FP8 ? 1 : 2;  // of 32 columns
constexpr int PARTS = 4 / PART_BLOCKS;

// What a thread that multiplies knows of itself. The addresses are of its first elements, in stage 0.
struct Multiplier {
  int first_panel, row_group, lane;
  SharedAddress codes, scales, input_scales, full;
  u32 operand;  // describes the inputs of stage 0, the low word

  __device__ __forceinline__ explicit Multiplier(Shared& shared)
      : first_panel(threadIdx.x / 128 * OWN_PANELS), row_group(threadIdx.x / LANES % 4), lane(threadIdx.x % LANES) {
    const Stage& stage = shared.stages[0];
    const u8* const tile = stage.weights[first_panel];
    const u8* const rows = tile + row_group * ROW_GROUP_BYTES;
    codes = fixed_address(rows + lane * 16);
    scales = fixed_address(FP8 ? tile + 4 * ROW_GROUP_BYTES : rows + 1024 + lane / 4 * 8);
    input_scales = fixed_address(stage.scales[lane % 4]);
    full = fixed_address(shared.full);
    operand = (u32)product_operand(stage.inputs, PIECE_BYTES, 128);
  }
};

// A stage as such a thread uses it.
struct OwnStage {
  const Multiplier& own;
  int offset;   // bytes from stage 0
  u32 operand;  // of its inputs

  __device__ __forceinline__ OwnStage(const Multiplier& own, int slot)
      : own(own), offset(slot * (int)sizeof(Stage)),
        // The shuffle tells the compiler that it is the same in all lanes.
        operand(__shfl_sync(FULL_MASK, own.operand + slot * (u32)(sizeof(Stage) >> 4), 0)) {}

  // Of 32 columns q, from a pair on.
  __device__ __forceinline__ u64 inputs(int q, int pair) const {
    return (u64)(128 >> 4) << 32 | (operand + (u32)((2 * q * PIECE_BYTES + pair * 16) >> 4));
  }
};

// Of a part, lane by lane: FP4 the codes of two blocks of 32 columns, FP8 of one; each eight of a row slot and of that
// eight behind it.
__device__ __forceinline__ uint4 load_codes(const OwnStage& stage, int panel, int part) {
  return load_shared_16(stage.own.codes + (stage.offset + panel * TILE_BYTES + part * 512));
}
// Of row slots lane / 4 and lane / 4 + 8. FP4: four bytes each, FP8: a float each.
__device__ __forceinline__ uint2 load_row_scales(const OwnStage& stage, int panel) {
  return load_shared_8(stage.own.scales + (stage.offset + panel * TILE_BYTES));
}

#if !FP8
// Scales of a lane's two rows and 128 columns, and which blocks of 32 columns are not all zero: those that are have no
// say, whatever their scales.
struct UsedScales {
  uint2 scales;
  u32 used;  // a bit for each block of the lower row, then of the upper one

  __device__ __forceinline__ UsedScales(const OwnStage& stage, int panel) : scales(load_row_scales(stage, panel)) {
    constexpr u32 MAGNITUDES = 0x5F5F5F5Fu;  // of a packed word; the rest are signs
    used = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint4 codes = load_codes(stage, panel, part);
      const u32 lower[2] = {codes.x, codes.z}, upper[2] = {codes.y, codes.w};
#pragma unroll
      for (int block = 0; block < 2; block++) {
        used |= (u32)((lower[block] & MAGNITUDES) != 0) << (part * 2 + block);
        used |= (u32)((upper[block] & MAGNITUDES) != 0) << (part * 2 + block + 4);
      }
    }
    used |= __shfl_xor_sync(FULL_MASK, used, 1);
    used |= __shfl_xor_sync(FULL_MASK, used, 2);
  }

  __device__ __forceinline__ int scale(int half, int q) const {
    return (int)((half ? scales.y : scales.x) >> 8 * q & 0xFFu);
  }
  __device__ __forceinline__ int largest(int half) const {
    int largest = 0;
#pragma unroll
    for (int q = 0; q < 4; q++)
      if (used >> (half * 4 + q) & 1) largest = max(largest, scale(half, q));
    return largest;
  }
};

#endif

// The unit of a lane's sums of a panel's two row slots: FP8 the scale of the weights last added, FP4 a power of two.
template <int N>
struct RowUnits {
#if FP8
  float of[2];

  __device__ __forceinline__ void begin(const OwnStage& stage, int panel) { of[0] = of[1] = 1; }
  __device__ __forceinline__ float factor(int half) const { return of[half]; }
#else
  // Bytes of scales less `zero` are the exponents of decoded numbers, 2^(exponent - 6) times the code. From 1 on all
  // codes are normal e4m3 numbers; beyond 12 they have none.
  static constexpr int LARGEST = 12;
  static constexpr int BEGIN = 9;      // the exponent of the largest scale of the first columns: most are smaller
  static constexpr int SMALLEST = 4;   // scale, for which the factor is a normal number
  static constexpr int FARTHEST = 80;  // below the largest unit of the warp: sums could become infinite

  int zero[2];
  int top;  // the largest `zero` that the warp has had

  __device__ __forceinline__ void begin(const OwnStage& stage, int panel) {
    if (SEPARATE_SCALES<N>) return;
    const UsedScales used(stage, panel);
    const int largest = warp_largest(max(used.largest(0), used.largest(1)));
    // Where all are zeros any scale will do.
    top = zero[0] = zero[1] = max(largest ? largest : 127, SMALLEST) - BEGIN;
  }

  __device__ __forceinline__ float factor(int half) const {
    return SEPARATE_SCALES<N> ? FP4_DECODED_TIMES : power_of_two(zero[half] + 6 - 127);
  }

  static __device__ __forceinline__ float power_of_two(int exponent) {
    return bits_to_float((u32)min(max(exponent + 127, 0), 254) << 23);
  }
  static __device__ __forceinline__ int warp_largest(int value) {
#pragma unroll
    for (int lanes = 4; lanes < LANES; lanes *= 2) value = max(value, __shfl_xor_sync(FULL_MASK, value, lanes));
    return value;
  }

  // All four bytes from 1 to LARGEST.
  static __device__ __forceinline__ bool fit(u32 exponents) {
    constexpr u32 UP = (0x7Fu - LARGEST) * 0x01010101u;
    return (((exponents + UP) | exponents | ~(exponents + 0x7F7F7F7Fu)) & 0x80808080u) == 0;
  }
#endif
};

// What becomes of the scales of a lane's two rows and 128 columns.
template <int N>
struct RowScales {
  u32 of[2];  // FP4: separate scales as they are, else the exponents of decoded numbers, a byte a block
  // What the sums so far are to be multiplied by, for they get another unit; whether it is needed is the same in all
  // lanes.
  bool changed;
  float change[2];

#if FP8
  __device__ __forceinline__ void load(const OwnStage& stage, int panel, RowUnits<N>& units) {
    const uint2 scales = load_row_scales(stage, panel);
    const float next[2] = {bits_to_float(scales.x), bits_to_float(scales.y)};
    changed = next[0] != units.of[0] || next[1] != units.of[1];
    if (!changed) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      change[half] = 1;
      if (next[half] == 0) continue;  // of zeros
      change[half] = __fdividef(units.of[half], next[half]);
      units.of[half] = next[half];
    }
  }
#else
  __device__ __forceinline__ void load(const OwnStage& stage, int panel, RowUnits<N>& units) {
    const uint2 scales = load_row_scales(stage, panel);
    of[0] = scales.x, of[1] = scales.y, changed = false;
    if constexpr (!SEPARATE_SCALES<N>) {
      of[0] -= (u32)units.zero[0] * 0x01010101u, of[1] -= (u32)units.zero[1] * 0x01010101u;
      changed = __any_sync(FULL_MASK, !units.fit(of[0]) || !units.fit(of[1]));
      if (changed) change_units(stage, panel, units);
    }
  }

  // The rows whose scales do not fit: the largest gets the largest exponent, and the packing has seen to the others.
  __device__ __forceinline__ void change_units(const OwnStage& stage, int panel, RowUnits<N>& units) {
    const UsedScales used(stage, panel);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int largest = used.largest(half), before = units.zero[half];
      if (!units.fit(of[half]) && largest) units.zero[half] = max(largest - units.LARGEST, units.top - units.FARTHEST);
      change[half] = units.power_of_two(before - units.zero[half]);
      of[half] = 0;
#pragma unroll
      for (int q = 0; q < 4; q++)
        of[half] |= (u32)min(max(used.scale(half, q) - units.zero[half], 1), units.LARGEST) << 8 * q;
    }
    units.top = max(units.top, units.warp_largest(max(units.zero[0], units.zero[1])));
  }
#endif

  __device__ __forceinline__ void apply_change(float (&sums)[N / 2]) const {
    if (!changed) return;
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] *= change[i % 4 / 2];
  }
};

#if !FP8
// __byte_perm whose selector has no bit but those of its four indices: the compiler need not clear others.
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
#ifdef DSV4C_EMULATE
  return __byte_perm(low, high, selector);
#else
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
#endif
}

// Eight codes times 2^(exponent - 6): low columns 0 to 3, high 4 to 7. The bits of a packed word (experts_packed.cuh),
// rotated by two, have in their even nibbles the magnitudes of codes 0 to 3, in the odd ones those of 5, 6, 7 and 4
// with one bit elsewhere; as nibbles they select bytes of a table of the eight magnitudes.
__device__ __forceinline__ void decode_scaled_fp4(u32 codes, u32 exponent, u32& low, u32& high) {
  const u32 small = exponent * 0x08080800u + 0x0C080000u, large = exponent * 0x08080808u + 0x1C181410u;
  const u32 rotated = __funnelshift_r(codes, codes, 2);
  const u32 magnitudes = (rotated & 0x57575757u) | (rotated >> 2 & 0x20202020u);
  const u32 of_0516 = select_bytes(small, large, magnitudes), of_2734 = select_bytes(small, large, magnitudes >> 16);
  low = select_bytes(of_0516, of_2734, 0x6420) | (codes & 0x80808080u);
  high = select_bytes(of_0516, of_2734, 0x5317) | (codes << 2 & 0x80808080u);
}
#endif

// A part of a row group: A's registers for each block.
typedef u32 Part[PART_BLOCKS][4];

template <int N>
__device__ __forceinline__ void decode(Part& a, const OwnStage& stage, int panel, int part,
                                       const RowScales<N>& scales) {
  const uint4 codes = load_codes(stage, panel, part);
#if FP8
  a[0][0] = codes.x, a[0][2] = codes.y, a[0][1] = codes.z, a[0][3] = codes.w;
#else
  const u32 words[2][2] = {{codes.x, codes.y}, {codes.z, codes.w}};
#pragma unroll
  for (int block = 0; block < PART_BLOCKS; block++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32& low = a[block][half];
      u32& high = a[block][half + 2];
      if (SEPARATE_SCALES<N>) {
        decode_fp4(words[block][half], low, high);
      } else {
        const u32 exponent = select_bytes(scales.of[half], 0, 0x4440 + part * PART_BLOCKS + block);
        decode_scaled_fp4(words[block][half], exponent, low, high);
      }
    }
#endif
}
