// The product of a unit: a warpgroup has a panel, a warp a row group of it, by all pairs.
#pragma once

#include "experts_prefill_decode.cuh"
#include "experts_units_finish.cuh"

struct Rings {
  Ring<WEIGHTS_STAGES> weights;
  Ring<INPUTS_STAGES> inputs;
  __device__ __forceinline__ void advance() { weights.advance(), inputs.advance(); }
};

__device__ __forceinline__ void wait_for_weights(const Multiplier& own, const Rings& rings) {
  barrier_wait(own.weights_full + 8 * rings.weights.slot, rings.weights.parity);
}
__device__ __forceinline__ void wait_for_inputs(const Multiplier& own, const Rings& rings) {
  barrier_wait(own.inputs_full + 8 * rings.inputs.slot, rings.inputs.parity);
}
__device__ __forceinline__ void free_weights(const Multiplier& own, int slot) {
  __syncwarp();
  if (own.lane == 0) barrier_arrive(own.weights_full + (WEIGHTS_TO_EMPTY + 8 * slot));
}
__device__ __forceinline__ void free_inputs(const Multiplier& own, int slot) {
  __syncwarp();
  if (own.lane == 0) barrier_arrive(own.inputs_full + (INPUTS_TO_EMPTY + 8 * slot));
}

// Blocks of 32 columns that are decoded and multiplied at a time, as registers allow.
template <int N>
constexpr int BLOCKS = N > 64 ? 1 : 2;

// What a thread decodes, ahead of the products: the next blocks of columns, from codes that were loaded before.
template <int N>
struct Decoder {
  const Multiplier& own;
  Rings& rings;
  int tiles;  // that are left, with the one that is decoded
  RowScales scales;
  Codes codes;
  bool fits;  // whether the units of the sums serve for the tile

  __device__ __forceinline__ Decoder(const Multiplier& own, Rings& rings, int tiles)
      : own(own), rings(rings), tiles(tiles), scales((wait_for_weights(own, rings), own), rings.weights.slot) {
    begin_tile();
  }

  __device__ __forceinline__ void begin_tile() {
    fits = scales.load(own, rings.weights.slot);
    codes.load(own, rings.weights.slot, 0);
  }

  // Blocks q to q + BLOCKS - 1 of a tile; behind those of a half it loads the other half's codes, or the next tile's.
  __device__ __forceinline__ void decode(Operand<BLOCKS<N>>& to, int q) {
#pragma unroll
    for (int i = 0; i < BLOCKS<N>; i++) codes.decode(to.steps + 2 * i, scales, q + i);
    const int last = q + BLOCKS<N> - 1, slot = rings.weights.slot;
    if (last == 1) codes.load(own, slot, 1);
    if (last != 3) return;
    free_weights(own, slot);
    rings.weights.advance();
    if (--tiles == 0) return;
    wait_for_weights(own, rings);
    begin_tile();
  }

  // Where they do not: others, and the blocks once more that were decoded for the old ones.
  __device__ __forceinline__ void change_units(float (&factors)[2], Operand<BLOCKS<N>>& to) {
    scales.change(own, rings.weights.slot, factors);
    codes.load(own, rings.weights.slot, 0);
    decode(to, 0);
  }
};

// Over `tiles` of 128 columns. Products of some columns are under way while the next ones are decoded, those of the next
// tile too; between tiles all are waited for, without which ptxas 12.6 would wait for each.
template <int N>
__device__ __forceinline__ void multiply(Sums<N>& sums, const Multiplier& own, Rings& rings, int tiles) {
  // Of the inputs: N * 16 bytes between pieces of eight columns, 128 between eight pairs and the next.
  constexpr u32 PIECES_APART = N << 16, PAIRS_APART = 128 >> 4;
  constexpr int STEP = 2 * N;  // 16 columns further
  constexpr int GROUPS_OF_TILE = 4 / BLOCKS<N>;
  Operand<BLOCKS<N>> a[2];
  Decoder<N> decoder(own, rings, tiles);
  decoder.decode(a[0], 0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int slot = rings.inputs.slot;
    // The shuffle tells the compiler that it is the same in all lanes.
    const u32 inputs = __shfl_sync(FULL_MASK, own.inputs + PIECES_APART + slot * (u32)(sizeof(InputsStage) >> 4), 0);
    wait_for_inputs(own, rings);
    rings.inputs.advance();
#pragma unroll
    for (int group = 0; group < GROUPS_OF_TILE; group++) {
      Operand<BLOCKS<N>>& operand = a[group % 2];
      operand.keep();
      product_begin();
#pragma unroll
      for (int step = 0; step < 2 * BLOCKS<N>; step++)
        add_f16_product<N>(sums.of, operand.steps[step],
                           (u64)PAIRS_APART << 32 | (inputs + (u32)((group * 2 * BLOCKS<N> + step) * STEP)));
      product_commit();
      if (group > 0) product_wait<1>();
      if (group + 1 < GROUPS_OF_TILE)
        decoder.decode(a[(group + 1) % 2], (group + 1) * BLOCKS<N>);
      else if (decoder.tiles)
        decoder.decode(a[0], 0);
    }
    product_wait<0>();
    keep_sums(sums.of);
    free_inputs(own, slot);
    if (!FP8 || decoder.fits || !decoder.tiles) continue;
    float factors[2];
    decoder.change_units(factors, a[0]);
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums.of[i] *= factors[i % 4 / 2];
  }
  sums.factors[0] = decoder.scales.factor(0), sums.factors[1] = decoder.scales.factor(1);
}

// Where the strip has no panel for the warpgroup.
__device__ __forceinline__ void skip(const Multiplier& own, Rings& rings, int tiles) {
  for (int tile = 0; tile < tiles; tile++, rings.advance()) {
    wait_for_weights(own, rings);
    free_weights(own, rings.weights.slot);
    wait_for_inputs(own, rings);
    free_inputs(own, rings.inputs.slot);
  }
}
