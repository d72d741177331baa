// The compute warps of experts_stream.cu: inputs of a place, decoding, products.
#pragma once

#include "experts_stream.cuh"
#include "hopper_four_products.cuh"
#include "quantize.cuh"

// What a compute warp knows of itself. The addresses are of its lane's first elements, in slot 0.
struct ComputeWarp {
  int group, row_group, lane;
  u8* inputs;           // of its warpgroup
  float* input_scales;  // [slot][pair]
  u32 operand;          // describes the inputs of slot 0, the low word
  SharedAddress codes, scales, own_input_scales, full, empty;  // the last two: the barriers of the ring
};

// The four warps of a warpgroup.
__device__ __forceinline__ void meet(const ComputeWarp& warp) { named_barrier(1 + warp.group, 128); }

// Of one tile and the pairs that a lane has sums of: two of each eight.
typedef uint2 InputScales[EIGHTS];

__device__ __forceinline__ void load_input_scales(const ComputeWarp& warp, int slot, InputScales& scales) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; eight++)
    scales[eight] = load_shared_8(warp.own_input_scales + (slot * TILE + eight * 8) * 4);
}

// Of element i of the sums.
__device__ __forceinline__ float scale_of(const InputScales& scales, int i) {
  return bits_to_float(i % 2 ? scales[i / 4].y : scales[i / 4].x);
}

// The row group of one tile, decoded, times the inputs of the tile.
__device__ __forceinline__ void multiply_fp4(const ComputeWarp& warp, int ring_offset, SharedAddress empty, int slot,
                                             Sums& sums) {
  const uint4 codes[2] = {load_shared_16(warp.codes + ring_offset), load_shared_16(warp.codes + ring_offset + 512)};
  const uint2 scales = load_shared_8(warp.scales + ring_offset);
  InputScales input_scales;
  load_input_scales(warp, slot, input_scales);
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(empty);
  u32 a[4][4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const uint4 pair = codes[q / 2];
    decode_fp4(q % 2 ? pair.z : pair.x, a[q][0], a[q][2]);
    decode_fp4(q % 2 ? pair.w : pair.y, a[q][1], a[q][3]);
  }
  float d[4][TILE / 2], scaled[TILE / 2];
  four_products<TILE>(d, a, warp.operand + slot * 4 * BLOCK_STEP<TILE>);
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float low = fp4_scale_of(scales.x, q), high = fp4_scale_of(scales.y, q);
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) {
      const float scale = i % 4 < 2 ? low : high;
      scaled[i] = q ? fmaf(scale, d[q][i], scaled[i]) : scale * d[q][i];
    }
  }
#pragma unroll
  for (int i = 0; i < TILE / 2; i++) sums[i] = fmaf(scale_of(input_scales, i), scaled[i], sums[i]);
}

__device__ __forceinline__ void multiply_fp8(const ComputeWarp& warp, int ring_offset, SharedAddress empty, int slot,
                                             Sums& sums) {
  uint4 codes[4];
#pragma unroll
  for (int q = 0; q < 4; q++) codes[q] = load_shared_16(warp.codes + ring_offset + 512 * q);
  const uint2 scales = load_shared_8(warp.scales + ring_offset);
  InputScales input_scales;
  load_input_scales(warp, slot, input_scales);
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(empty);
  u32 a[4][4];
#pragma unroll
  for (int q = 0; q < 4; q++) a[q][0] = codes[q].x, a[q][1] = codes[q].z, a[q][2] = codes[q].y, a[q][3] = codes[q].w;
  // Apart, though the four share their scales: in a chain the tensor cores keep fewer bits of the sum.
  float d[4][TILE / 2], sum[TILE / 2];
  four_products<TILE>(d, a, warp.operand + slot * 4 * BLOCK_STEP<TILE>);
#pragma unroll
  for (int q = 0; q < 4; q++)
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) sum[i] = q ? sum[i] + d[q][i] : d[q][i];
#pragma unroll
  for (int i = 0; i < TILE / 2; i++)
    sums[i] = fmaf(scale_of(input_scales, i) * bits_to_float(i % 4 < 2 ? scales.x : scales.y), sum[i], sums[i]);
}

// A warp's part of a panel, handed over to the finishing warps.
template <int TILES>
__device__ __forceinline__ void compute_panel(Shared& shared, const ComputeWarp& warp, Ring<SLOTS>& ring,
                                              Ring<BUFFERS>& buffer) {
  // Where the panels fill the ring a whole number of times, its slots are known to the compiler.
  constexpr bool WHOLE = SLOTS1 % SLOTS == 0 && SLOTS2 % SLOTS == 0;
  constexpr int PANEL_SLOTS = (TILES + WARPGROUPS - 1) / WARPGROUPS;
  // More would spill the sums of 16 pairs, and then products wait for one another.
  constexpr int UNROLLED = TILE == 8 ? SLOTS : 2;
  Sums sums = {};
#pragma unroll UNROLLED
  for (int slot = 0; slot < PANEL_SLOTS; slot++) {
    const int at = WHOLE ? slot % SLOTS : ring.slot;
    const u32 parity = WHOLE ? ring.parity ^ (slot / SLOTS & 1) : ring.parity;
    barrier_wait(fresh_address(warp.full, 8 * at), parity);
    const SharedAddress empty = fresh_address(warp.empty, 8 * at);
    if (STREAM_ONLY || (TILES % WARPGROUPS && slot * WARPGROUPS + warp.group >= TILES)) {
      __syncwarp();
      if (warp.lane == 0) barrier_arrive(empty);
    } else if (FP8) {
      multiply_fp8(warp, at * SLOT_BYTES, empty, slot, sums);
    } else {
      multiply_fp4(warp, at * SLOT_BYTES, empty, slot, sums);
    }
    if (!WHOLE) ring.advance();
  }
  if (WHOLE) ring.parity ^= PANEL_SLOTS / SLOTS & 1;

  barrier_wait(&shared.finished[buffer.slot], buffer.parity ^ 1);
#pragma unroll
  for (int eight = 0; eight < EIGHTS; eight++)
    shared.sums[buffer.slot][warp.group * 4 + warp.row_group][eight][warp.lane] = {
        sums[4 * eight], sums[4 * eight + 1], sums[4 * eight + 2], sums[4 * eight + 3]};
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(&shared.computed[buffer.slot]);
  buffer.advance();
}

// The inputs of the first projection: rows of x that are e4m3 already. Eight pairs at a time, for which the registers
// suffice. What is in the columns of pairs that the place lacks does not matter.
__device__ __forceinline__ void load_x(Shared& shared, const ComputeWarp& warp, const Place& place, const u8* xq,
                                       const float* xs) {
  constexpr int PIECES = TILE_COLUMNS / 16, EACH = (SLOTS1 * 8 * PIECES + 127) / 128;
  const int thread = warp.row_group * 32 + warp.lane;
#pragma unroll 1
  for (int eight = 0; eight < EIGHTS; eight++) {
    if (eight && eight * 8 >= place.count) break;
    uint4 values[EACH];
    float scales[EACH];
    // All loads are under way before the first is waited for.
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * 128 + thread, piece = at % PIECES;
      const int pair = min(eight * 8 + at / PIECES % 8, place.count - 1);
      const int tile = min(at / (PIECES * 8) * WARPGROUPS + warp.group, TILES1 - 1);
      const int row = shared.pairs[place.first + pair] / CHOICES;
      values[i] = *(const uint4*)(xq + (i64)row * HIDDEN + tile * TILE_COLUMNS + piece * 16);
      scales[i] = xs[row * TILES1 + tile];
    }
    if (eight == 0) meet(warp);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * 128 + thread, piece = at % PIECES, slot = at / (PIECES * 8);
      const int pair = eight * 8 + at / PIECES % 8;
      if (slot >= SLOTS1) break;
      *(uint4*)(warp.inputs + slot * INPUT_BYTES + piece * HALF_BYTES + pair * 16) = values[i];
      if (piece == 0) warp.input_scales[slot * TILE + pair] = scales[i];
    }
  }
  shared_proxy_fence();
  meet(warp);
}

// Eight columns of h, which other blocks wrote in this launch: not through L1.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
#ifdef DSV4C_EMULATE
  return *(const uint4*)from;
#else
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
#endif
}

// Rounds 128 columns, eight of each of 16 lanes, to e4m3 and puts them where products read them.
__device__ __forceinline__ void round_columns(const ComputeWarp& warp, const uint4& columns, int slot, int pair) {
  const u32 words[4] = {columns.x, columns.y, columns.z, columns.w};
  float values[8], amax = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[i] = bits_to_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
    amax = fmaxf(amax, fabsf(values[i]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
  const float scale = fp8_scale(amax), inverse = inverse_power(scale);
  u32 codes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) codes[i / 4] |= (u32)to_e4m3(values[i] * inverse).bits << 8 * (i % 4);
  const int eight = warp.lane % 16;
  u8* const to = warp.inputs + slot * INPUT_BYTES + eight / 4 * 2 * HALF_BYTES + pair * 16 + eight % 4 * 4;
  *(u32*)to = codes[0];
  *(u32*)(to + HALF_BYTES) = codes[1];
  if (eight == 0) warp.input_scales[slot * TILE + pair] = scale;
}

// A warpgroup's columns of a row of h, eight of a lane in each slot.
typedef uint4 Columns[SLOTS2];

__device__ __forceinline__ void load_columns(const ComputeWarp& warp, const bf16* row, Columns& columns) {
#pragma unroll
  for (int slot = 0; slot < SLOTS2; slot++) {
    const int tile = slot * WARPGROUPS + warp.group;
    columns[slot] = {0, 0, 0, 0};
    if (row && tile < TILES2) columns[slot] = load_fresh(row + tile * TILE_COLUMNS + warp.lane % 16 * 8);
  }
}

// The inputs of the second projection, once all panels of the place's first one are done.
__device__ __forceinline__ void load_h(const ComputeWarp& warp, const Place& place, const bf16* h, const u32* counter) {
  if (warp.row_group == 0 && warp.lane == 0)
    while (load_acquire(counter) < (u32)PANELS1) pause(20);
  meet(warp);
#pragma unroll 1
  for (int eight = 0; eight < EIGHTS; eight++) {
    if (eight && eight * 8 >= place.count) break;
    // A warp has two pairs of the eight, half a warp each.
    const int pair = eight * 8 + warp.row_group * 2 + warp.lane / 16;
    Columns columns;
    load_columns(warp, pair < place.count ? h + (i64)(place.first + pair) * INNER : nullptr, columns);
#pragma unroll
    for (int slot = 0; slot < SLOTS2; slot++)
      if (slot * WARPGROUPS + warp.group < TILES2) round_columns(warp, columns[slot], slot, pair);
  }
  shared_proxy_fence();
  meet(warp);
}

__device__ __forceinline__ void compute(Shared& shared, const Place* places, const u8* xq,
                                        const float* xs, const bf16* h, const u32* counters) {
  const Stretch& own = shared.own;
  const int index = threadIdx.x / 32;
  ComputeWarp warp;
  warp.group = index / 4, warp.row_group = index % 4, warp.lane = threadIdx.x % 32;
  const u8* const tile = shared.ring[0] + warp.group * TILE_BYTES;
  const u8* const rows = tile + warp.row_group * ROW_GROUP_BYTES;
  warp.codes = fixed_address(rows + 16 * warp.lane);
  warp.scales = fixed_address(FP8 ? tile + 4 * ROW_GROUP_BYTES : rows + 1024 + warp.lane / 4 * 8);
  warp.full = fixed_address(shared.full), warp.empty = fixed_address(shared.empty);
  warp.inputs = shared.inputs[warp.group];
  warp.input_scales = shared.input_scales[warp.group];
  warp.own_input_scales = fixed_address(warp.input_scales + warp.lane % 4 * 2);
  // The shuffle tells the compiler that it is the same in all lanes.
  warp.operand = __shfl_sync(0xFFFFFFFFu, (u32)product_operand(warp.inputs, HALF_BYTES, 128), 0);
  Ring<SLOTS> ring;
  Ring<BUFFERS> buffer;
  int place = -1;
#pragma unroll 1
  for (int i = 0; i < count(own.first); i++) {
    const int next = panel_of(own.first, i) / PANELS1;
    if (next != place) {
      place = next;
      load_x(shared, warp, places[place], xq, xs);
    }
    compute_panel<TILES1>(shared, warp, ring, buffer);
  }
  place = -1;
#pragma unroll 1
  for (int i = 0; i < count(own.second); i++) {
    const int next = panel_of(own.second, i) / PANELS2;
    if (next != place) {
      place = next;
      load_h(warp, places[place], h, counters + (&places[place] - shared.places));
    }
    compute_panel<TILES2>(shared, warp, ring, buffer);
  }
}
