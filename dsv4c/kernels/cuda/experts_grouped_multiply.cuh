// The product of a unit: a warpgroup has one panel or two, a warp a row group of each, by all pairs.
#pragma once

#include "experts_grouped_rows.cuh"

// Of many pairs one slice after the other, so that registers hold the sums of two products that follow one another.
template <int N>
constexpr int SLICES = N == 128 ? 4 : N >= 32 ? 2 : 1;
template <int N>
constexpr int SLICE = N / SLICES<N>;
// The second projection is not rounded to e4m3 any more: there all parts may go into one sum, where every slice has its
// own registers.
template <int N>
constexpr bool PARTS_TOGETHER = !FP8 && !SEPARATE_SCALES<N> && SLICES<N> == 2;

// Products of a part and a slice of the pairs: of each block apart, or in one sum.
template <int N>
struct Products {
  float d[SEPARATE_SCALES<N> ? PART_BLOCKS : 1][SLICE<N> / 2];

  __device__ __forceinline__ void start(const Part& a, const OwnStage& stage, int part, int slice, bool add) {
    product_begin();
#pragma unroll
    for (int block = 0; block < PART_BLOCKS; block++)
      product<SLICE<N>>(d[SEPARATE_SCALES<N> ? block : 0], a[block],
                       stage.inputs(part * PART_BLOCKS + block, slice * SLICE<N>),
                       !SEPARATE_SCALES<N> && (add || block > 0));
    product_commit();
  }

  // Behind the wait for them: adds them to the sums, multiplied by the scales of the inputs, and of the rows if
  // separate.
  __device__ __forceinline__ void finish(float (&sums)[N / 2], const RowScales<N>& scales, SharedAddress input_scales,
                                         int part, int slice) {
#pragma unroll
    for (auto& block : d) keep_sums(block);
#if !FP8
    if (SEPARATE_SCALES<N>) scale_separately(scales, part);
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
  __device__ __forceinline__ void scale_separately(const RowScales<N>& scales, int part) {
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

// Sums of a warp's row groups by N pairs: element 4 j + i is of pair 8 j + 2 (lane % 4) + i % 2 and row slot
// lane / 4 + i / 2 * 8. They are yet to be multiplied by the factors of the slots.
template <int N>
struct Sums {
  float of[OWN_PANELS][N / 2];
  float factors[OWN_PANELS][2];
};

// The fence lets products see what copies of other threads have written.
__device__ __forceinline__ void wait_for_stage(const Multiplier& own, const Ring<STAGES>& ring) {
  barrier_wait(own.full + 8 * ring.slot, ring.parity);
  shared_proxy_fence();
}
__device__ __forceinline__ void free_stage(const Multiplier& own, int slot) {
  __syncwarp();
  if (own.lane == 0) barrier_arrive(own.full + (FULL_TO_EMPTY + 8 * slot));
}

// Over all `tiles` of the ring, of a panel's 128 columns in one sum (`Together`) or part by part. Products of one
// piece, a part by a slice, are under way while those of the piece before are added up and the next part is decoded.
template <int N, bool Together>
__device__ __forceinline__ void multiply(Sums<N>& sums, const Multiplier& own, Ring<STAGES>& ring, int tiles) {
  constexpr int ALL_PARTS = OWN_PANELS * PARTS, PIECES = ALL_PARTS * SLICES<N>;
  static_assert(ALL_PARTS % 2 == 0);
  Products<N> products[2];
  Part a[2];
  RowUnits<N> units[OWN_PANELS];
  RowScales<N> scales, next;
  const auto begin_panel = [&](const OwnStage& stage, int panel, Part& part) {
    next.load(stage, panel, units[panel]);
    decode(part, stage, panel, 0, next);
  };
  const auto finish = [&](int piece, SharedAddress input_scales) {
    const int part = piece / SLICES<N>;
    products[piece % 2].finish(sums.of[part / PARTS], scales, input_scales, part % PARTS, piece % SLICES<N>);
  };
  wait_for_stage(own, ring);
  for (int panel = 0; panel < OWN_PANELS; panel++) units[panel].begin(OwnStage(own, ring.slot), panel);
  begin_panel(OwnStage(own, ring.slot), 0, a[0]);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int slot = ring.slot;
    const OwnStage stage(own, slot);
    ring.advance();
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const int all_part = piece / SLICES<N>, panel = all_part / PARTS, part = all_part % PARTS;
      products[piece % 2].start(a[all_part % 2], stage, part, piece % SLICES<N>, Together && part > 0);
      if (piece > 0) {
        product_wait<1>();
        // The part before may go on.
        if (!Together || (piece - 1) / SLICES<N> % PARTS == PARTS - 1)
          finish(piece - 1, own.input_scales + stage.offset);
      }
      if (piece % (PARTS * SLICES<N>) == 0) {
        scales = next;
        scales.apply_change(sums.of[panel]);
      }
      if (piece % SLICES<N> != SLICES<N> - 1) continue;
      Part& following = a[(all_part + 1) % 2];
      if (part + 1 < PARTS) {
        decode(following, stage, panel, part + 1, scales);
      } else if (panel + 1 < OWN_PANELS) {
        begin_panel(stage, panel + 1, following);
      } else if (tile + 1 < tiles) {
        wait_for_stage(own, ring);
        begin_panel(OwnStage(own, ring.slot), 0, following);
      }
    }
    product_wait<0>();
    finish(PIECES - 1, own.input_scales + stage.offset);
    free_stage(own, slot);
  }
  for (int panel = 0; panel < OWN_PANELS; panel++)
    for (int half = 0; half < 2; half++) sums.factors[panel][half] = units[panel].factor(half);
}

// Where the strip has no panels for the warpgroup.
__device__ __forceinline__ void skip(const Multiplier& own, Ring<STAGES>& ring, int tiles) {
  for (int tile = 0; tile < tiles; tile++, ring.advance()) {
    wait_for_stage(own, ring);
    free_stage(own, ring.slot);
  }
}
