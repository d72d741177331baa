// The product of a unit: a warpgroup has a panel, a warp a row group of it, by all pairs.
#pragma once

#include "experts_grouped_rows.cuh"
#include "experts_units_finish.cuh"

typedef Ring<WEIGHTS_STAGES> Rings;  // of weights and inputs together

// Of 32 pairs one half after the other, so that registers hold the sums of two products that follow one another.
template <int N>
constexpr int SLICES = N == 32 ? 2 : 1;
template <int N>
constexpr int SLICE = N / SLICES<N>;

// Products of a part and a slice of the pairs, of each block apart.
template <int N>
struct Products {
  float d[PART_BLOCKS][SLICE<N> / 2];

  __device__ __forceinline__ void start(const Part& a, const OwnStage& stage, int part, int slice) {
    product_begin();
#pragma unroll
    for (int block = 0; block < PART_BLOCKS; block++)
      product<SLICE<N>>(d[block], a[block], stage.inputs(part * PART_BLOCKS + block, slice * SLICE<N>), false);
    product_commit();
  }

  // Behind the wait for them: adds them to the sums, multiplied by the scales of the inputs, and of the rows if
  // separate.
  __device__ __forceinline__ void finish(float (&sums)[N / 2], const RowScales& scales, SharedAddress input_scales,
                                         int part, int slice) {
#pragma unroll
    for (auto& block : d) keep_sums(block);
#if !FP8
    scale_separately(scales, part);
#endif
    const int begin = slice * (SLICE<N> / 8), end = begin + SLICE<N> / 8;
#pragma unroll
    for (int j = begin; j < end; j++) {
      if (j % 2 == 1 && j > begin) continue;  // came with the eight before
      if (j % 2 == 0 && j + 1 < end) {
        const uint4 four = load_shared_16(input_scales + j * 8);
        add_eight(sums, j, begin, four.x, four.y);
        add_eight(sums, j + 1, begin, four.z, four.w);
      } else {
        const uint2 two = load_shared_8(input_scales + j * 8);
        add_eight(sums, j, begin, two.x, two.y);
      }
    }
  }

 private:
#if !FP8
  __device__ __forceinline__ void scale_separately(const RowScales& scales, int part) {
#pragma unroll
    for (int block = 0; block < PART_BLOCKS; block++) {
      const int q = part * PART_BLOCKS + block;
      const float low = fp4_scale_of(scales.of[0], q), high = fp4_scale_of(scales.of[1], q);
#pragma unroll
      for (int i = 0; i < SLICE<N> / 2; i++) {
        const float scale = i % 4 < 2 ? low : high;
        d[0][i] = block ? fmaf(scale, d[block][i], d[0][i]) : scale * d[0][i];
      }
    }
  }
#endif

  // Eight pairs from 8 j on, two a lane; d begins at 8 `begin`.
  __device__ __forceinline__ void add_eight(float (&sums)[N / 2], int j, int begin, u32 even_scale, u32 odd_scale) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      sums[4 * j + i] = fmaf(bits_to_float(i % 2 ? odd_scale : even_scale), d[0][4 * (j - begin) + i], sums[4 * j + i]);
  }
};

// The fence lets products see what copies of other threads have written.
__device__ __forceinline__ void wait_for_stage(const Multiplier& own, const Rings& ring) {
  barrier_wait(own.full + 8 * ring.slot, ring.parity);
  shared_proxy_fence();
}
__device__ __forceinline__ void free_stage(const Multiplier& own, int slot) {
  __syncwarp();
  if (own.lane == 0) barrier_arrive(own.full + (FULL_TO_EMPTY + 8 * slot));
}

// Over all `tiles` of the ring. Products of one piece, a part by a slice, are under way while those of the piece before
// are added up and the next part is decoded.
template <int N>
__device__ __forceinline__ void multiply(Sums<N>& sums, const Multiplier& own, Rings& ring, int tiles) {
  constexpr int PIECES = PARTS * SLICES<N>;
  Products<N> products[2];
  Part a[2];
  RowUnits units;
  RowScales scales, next;
  const auto begin_tile = [&](const OwnStage& stage) {
    next.load(stage, units);
    decode(a[0], stage, 0);
  };
  const auto finish = [&](int piece, SharedAddress input_scales) {
    products[piece % 2].finish(sums.of, scales, input_scales, piece / SLICES<N>, piece % SLICES<N>);
  };
  wait_for_stage(own, ring);
  begin_tile(OwnStage(own, ring.slot));
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int slot = ring.slot;
    const OwnStage stage(own, slot);
    ring.advance();
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int part = piece / SLICES<N>;
      products[piece % 2].start(a[part % 2], stage, part, piece % SLICES<N>);
      if (piece > 0) {
        product_wait<1>();
        finish(piece - 1, own.input_scales + stage.offset);
      } else {
        scales = next;
        scales.apply_change(sums.of);
      }
      if (piece % SLICES<N> != SLICES<N> - 1) continue;
      if (part + 1 < PARTS) {
        decode(a[(part + 1) % 2], stage, part + 1);
      } else if (tile + 1 < tiles) {
        wait_for_stage(own, ring);
        begin_tile(OwnStage(own, ring.slot));
      }
    }
    product_wait<0>();
    finish(PIECES - 1, own.input_scales + stage.offset);
    free_stage(own, slot);
  }
  sums.factors[0] = units.factor(0), sums.factors[1] = units.factor(1);
}

// Where the strip has no panel for the warpgroup.
__device__ __forceinline__ void skip(const Multiplier& own, Rings& ring, int tiles) {
  for (int tile = 0; tile < tiles; tile++, ring.advance()) {
    wait_for_stage(own, ring);
    free_stage(own, ring.slot);
  }
}
