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

  // Behind the wait for them.
  __device__ __forceinline__ void keep() {
#pragma unroll
    for (auto& block : d) keep_sums(block);
  }
};

// Sums over a tile's columns, as far as they share the scales of the inputs: FP8 those of a part, FP4 those of all parts,
// multiplied by the scales of the rows.
template <int N>
struct TileSums {
  float of[N / 2];

  static __device__ __forceinline__ bool whole(int part) { return FP8 || part == PARTS - 1; }

  __device__ __forceinline__ void add(const Products<N>& products, const RowScales& scales, int part, int slice) {
#pragma unroll
    for (int block = 0; block < PART_BLOCKS; block++) {
#if !FP8
      const int q = part * PART_BLOCKS + block;
      const float low = fp4_scale_of(scales.of[0], q), high = fp4_scale_of(scales.of[1], q);
#endif
#pragma unroll
      for (int i = 0; i < SLICE<N> / 2; i++) {
        float& sum = of[slice * (SLICE<N> / 2) + i];
        const float product = products.d[block][i];
#if FP8
        sum = product;
#else
        const float scale = i % 4 < 2 ? low : high;
        sum = part || block ? fmaf(scale, product, sum) : scale * product;
#endif
      }
    }
  }

  // Of a slice, multiplied by the scales of its inputs.
  __device__ __forceinline__ void add_to(float (&sums)[N / 2], SharedAddress input_scales, int slice) const {
    constexpr int EIGHTS = SLICE<N> / 8;
    const int begin = slice * EIGHTS, end = begin + EIGHTS;
#pragma unroll
    for (int j = begin; j < end; j++) {
      if (j % 2 == 1 && j > begin) continue;  // came with the eight before
      if (j % 2 == 0 && j + 1 < end) {
        const uint4 four = load_shared_16(input_scales + j * 8);
        add_eight(sums, j, four.x, four.y);
        add_eight(sums, j + 1, four.z, four.w);
      } else {
        const uint2 two = load_shared_8(input_scales + j * 8);
        add_eight(sums, j, two.x, two.y);
      }
    }
  }

 private:
  // Eight pairs from 8 j on, two a lane.
  __device__ __forceinline__ void add_eight(float (&sums)[N / 2], int j, u32 even_scale, u32 odd_scale) const {
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i++)
      sums[i] = fmaf(bits_to_float(i % 2 ? odd_scale : even_scale), of[i], sums[i]);
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
  TileSums<N> tile_sums;
  Part a[2];
  RowUnits units;
  RowScales scales, next;
  const auto begin_tile = [&](const OwnStage& stage) {
    next.load(stage, units);
    decode(a[0], stage, 0);
  };
  const auto finish = [&](int piece, SharedAddress input_scales) {
    const int part = piece / SLICES<N>, slice = piece % SLICES<N>;
    products[piece % 2].keep();
    tile_sums.add(products[piece % 2], scales, part, slice);
    if (TileSums<N>::whole(part)) tile_sums.add_to(sums.of, input_scales, slice);
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
