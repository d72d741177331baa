// The mixing logits of the hyper-connections, on tensor cores: for every row of X [T, STREAMS, WIDTH] the products with
// the rows of fn [MIX_LOGITS, STREAMS * WIDTH] and the sum of its squares, in parts over the depth:
//   partial float [T, SPLITS, MIX_LOGITS + 1]
// Macros: those of mhc.cuh (X_TYPE is bf16) and
//   FN_TYPE    float or bf16
//   SPLITS     blocks that share the depth of a row (blockIdx.x)
//   ROW_TILES  tiles of 16 rows a block (blockIdx.y)
// WIDTH and the strides are multiples of 8, X is aligned to 16 bytes, fn to a load of 8.
//
// A product does not mind the order of its terms as long as both sides have the same one. So a lane takes 8 consecutive
// elements of a row, which is one load, where the fragments of two products would have pairs from four places.
#include "mhc.cuh"
#include "mma.cuh"

constexpr int WARPS = 4;
constexpr int DEPTH = STREAMS * WIDTH;
constexpr int STEP = 32;  // of the depth: 4 lanes with 8 elements
constexpr int STEPS = (DEPTH + STEP - 1) / STEP;
constexpr int ROWS = ROW_TILES * 16;
constexpr int COLUMNS = MIX_LOGITS + 1;
constexpr int COLUMN_TILES = (MIX_LOGITS + 7) / 8;

// fn as sums of bf16. Each term has the leading 8 bits of what is left, so that three of them are a float exactly.
template <typename T>
struct Terms;
template <>
struct Terms<float> {
  static constexpr int COUNT = 3;
  u32 pairs[COUNT][4];

  __device__ __forceinline__ void load(const float* fn) {
    const Pack<float, 8> pack = *reinterpret_cast<const Pack<float, 8>*>(fn);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      float low = pack.value[2 * pair], high = pack.value[2 * pair + 1];
#pragma unroll
      for (int term = 0; term < COUNT; term++) {
        const u32 low_bits = float_to_bits(low), high_bits = float_to_bits(high);
        pairs[term][pair] = __byte_perm(low_bits, high_bits, 0x7632);
        low -= bits_to_float(low_bits & 0xFFFF0000u);
        high -= bits_to_float(high_bits & 0xFFFF0000u);
      }
    }
  }
};
template <>
struct Terms<bf16> {
  static constexpr int COUNT = 1;
  u32 pairs[COUNT][4];

  __device__ __forceinline__ void load(const bf16* fn) {
    const uint4 pack = *reinterpret_cast<const uint4*>(fn);
    pairs[0][0] = pack.x, pairs[0][1] = pack.y, pairs[0][2] = pack.z, pairs[0][3] = pack.w;
  }
};

__device__ __forceinline__ float pair_squares(u32 pair) {
  const float low = bits_to_float(pair << 16), high = bits_to_float(pair & 0xFFFF0000u);
  return low * low + high * high;
}

__device__ __forceinline__ float squares(uint4 x) {
  return (pair_squares(x.x) + pair_squares(x.y)) + (pair_squares(x.z) + pair_squares(x.w));
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    mhc_logits(const bf16* __restrict__ x, const FN_TYPE* __restrict__ fn, float* __restrict__ partial,
               const StepHeader* __restrict__ step) {
  __shared__ float sums[WARPS][ROWS][COLUMNS];
  const int rows = step_rows(step), first_row = blockIdx.y * ROWS;
  if (!EAGER && first_row >= rows) return;
  const int warp = threadIdx.x / LANES, g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
  const int split = blockIdx.x, last = (int)((i64)(split + 1) * STEPS / SPLITS);

  float products[ROW_TILES][COLUMN_TILES][4] = {};
  float square[ROW_TILES][2] = {};
  // Loads are not made ahead: the registers that takes cost a block of an SM, which hides more.
  for (int s = (int)((i64)split * STEPS / SPLITS) + warp; s < last; s += WARPS) {
    const int k = s * STEP + 8 * t;
    const bool inside = k < DEPTH;
    const int stream = k / WIDTH, column = k % WIDTH;
    uint4 a[ROW_TILES][2];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + tile * 16 + half * 8 + g;
        const bf16* address = x + (i64)row * ROW_STRIDE + stream * STREAM_STRIDE + column;
        a[tile][half] = make_uint4(0, 0, 0, 0);
        if (inside && row < (EAGER ? CAPACITY : rows)) a[tile][half] = *reinterpret_cast<const uint4*>(address);
      }
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; tile++) {
      Terms<FN_TYPE> terms = {};
      const int logit = tile * 8 + g;
      if (inside && logit < MIX_LOGITS) terms.load(fn + logit * DEPTH + k);
#pragma unroll
      for (int term = 0; term < Terms<FN_TYPE>::COUNT; term++) {
        const u32(&b)[4] = terms.pairs[term];
#pragma unroll
        for (int row = 0; row < ROW_TILES; row++) {
          const uint4 low = a[row][0], high = a[row][1];
          mma_m16n8k16_bf16(products[row][tile], {low.x, high.x, low.y, high.y}, {b[0], b[1]});
          mma_m16n8k16_bf16(products[row][tile], {low.z, high.z, low.w, high.w}, {b[2], b[3]});
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) square[tile][half] += squares(a[tile][half]);
  }

#pragma unroll
  for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = tile * 16 + half * 8 + g;
      const float sum = warp_sum<4>(square[tile][half]);
      if (t == 0) sums[warp][row][MIX_LOGITS] = sum;
#pragma unroll
      for (int columns = 0; columns < COLUMN_TILES; columns++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = columns * 8 + 2 * t + i;
          if (column < MIX_LOGITS) sums[warp][row][column] = products[tile][columns][2 * half + i];
        }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += WARPS * LANES) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    if (first_row + row >= rows) break;
    float sum = sums[0][row][column];
#pragma unroll
    for (int other = 1; other < WARPS; other++) sum += sums[other][row][column];
    partial[((i64)(first_row + row) * SPLITS + split) * COLUMNS + column] = sum;
  }
}
