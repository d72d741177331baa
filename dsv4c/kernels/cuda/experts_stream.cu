// The routed experts of a step of few rows, in one launch of a block on every SM: the weights of the experts hit stream
// from memory once, through a ring in shared memory, past warps that decode and multiply them.
//
// Work is counted in panels (experts_packed.cuh) of the places of the list: first all panels of w13, whose products h go
// to global memory, then all of w2. Each block has a contiguous stretch of both, so that all read about the same number
// of bytes; its weights flow on from the first to the second without a pause, while whoever computes waits for a place's
// h on the counter of that place. Before its first wait a block has done all of its first stretch: however few blocks
// run at a time, the blocks of the first places can always finish, and make room (dsv4c/kernels/README.md).
//
// The warps of a block:
//   0 to 15   compute, as four warpgroups that share the columns: of each slot of the ring (64 rows x 512 columns),
//             warpgroup w takes the tile w, its warp r the row group r. Each warpgroup keeps its quarter of the inputs.
//   16        copies weights into the ring
//   17 to 19  finish: add up what the four warpgroups have of a panel, in a fixed order; every third panel is a warp's
// Not one more: with five warps on each quarter of an SM a thread has 96 registers, with six only 80. A warp that
// finishes waits for its stores before it counts, which takes longer than a panel: so each has a panel of its own.
//
// What a block hands to others, h and the parts of the sums, is announced by counters behind fences, or, for the few rows
// whose time those would be (TAGGED), carries its own news: words of eight bytes, data and a tag that the launch before
// has cleared. Who needs such a word reads it until the tag is there.
//
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, SMS, GROUPS (of
// SMs that share places), TILE (pairs of a place: 8 or 16), ROWS (the bucket's), OUT_STRIDE, SLOTS (of the ring),
// TAGGED,
// SHARED_BYTES; for measuring, STREAM_ONLY 1 leaves the products out.
#include "experts_packed.cuh"
#include "hopper_chain.cuh"
#include "quantize.cuh"
#include "step.cuh"

#ifndef STREAM_ONLY
#define STREAM_ONLY 0
#endif

constexpr int WARPGROUPS = 4, COMPUTE_WARPS = 4 * WARPGROUPS, FINISH_WARPS = 3;
constexpr int COPY_WARP = COMPUTE_WARPS, FIRST_FINISH_WARP = COPY_WARP + 1;
constexpr int THREADS = 32 * (COMPUTE_WARPS + 1 + FINISH_WARPS);

constexpr int SLOT_BYTES = WARPGROUPS * TILE_BYTES;
constexpr int SLOTS1 = (TILES1 + WARPGROUPS - 1) / WARPGROUPS, SLOTS2 = (TILES2 + WARPGROUPS - 1) / WARPGROUPS;
constexpr int MOST_SLOTS = SLOTS1 > SLOTS2 ? SLOTS1 : SLOTS2;
// The inputs of one tile, for all pairs of a place: [k32][half][pair][16 bytes], core matrices as products take them.
constexpr int INPUT_BYTES = TILE_COLUMNS * TILE, HALF_BYTES = 16 * TILE;
constexpr int PARTS = TILE / 8;  // of eight pairs
constexpr int PAIRS = ROWS * CHOICES, PAIRS_HIT = PAIRS < EXPERTS ? PAIRS : EXPERTS;
constexpr int MOST_PLACES = PAIRS_HIT + (PAIRS - PAIRS_HIT) / TILE;
constexpr int ROW_GROUPS = 4;  // of a panel
constexpr int BUFFERS = FINISH_WARPS;  // of sums between computing and finishing: each finishing warp has its own

struct Shared {
  u8 ring[SLOTS][SLOT_BYTES];
  u8 inputs[WARPGROUPS][MOST_SLOTS * INPUT_BYTES];
  float input_scales[WARPGROUPS][MOST_SLOTS * TILE];
  float4 sums[BUFFERS][COMPUTE_WARPS][PARTS][32];
  Place places[MOST_PLACES];
  int pairs[PAIRS];
  u64 full[SLOTS], empty[SLOTS];
  u64 computed[BUFFERS], finished[BUFFERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

// The panels of a block: [begin, end) of those of all places, counted through, of either projection.
struct Stretch {
  int begin1, end1, begin2, end2;
};

// The slots that come before block `index` of `blocks` are its share of all; first those of w13, then as many of w2 as
// are left. Where that would take away from an earlier block, both are shared evenly.
__device__ __forceinline__ Stretch stretch_of(int places, int index, int blocks) {
  const int panels1 = places * PANELS1, panels2 = places * PANELS2;
  const int slots = panels1 * SLOTS1 + panels2 * SLOTS2;
  const bool together = (panels1 + blocks - 1) / blocks * SLOTS1 <= slots / blocks;
  Stretch stretch;
  stretch.begin1 = (int)((i64)panels1 * index / blocks), stretch.end1 = (int)((i64)panels1 * (index + 1) / blocks);
  if (together) {
    stretch.begin2 = ((int)((i64)slots * index / blocks) - stretch.begin1 * SLOTS1) / SLOTS2;
    stretch.end2 = ((int)((i64)slots * (index + 1) / blocks) - stretch.end1 * SLOTS1) / SLOTS2;
  } else {
    stretch.begin2 = (int)((i64)panels2 * index / blocks), stretch.end2 = (int)((i64)panels2 * (index + 1) / blocks);
  }
  return stretch;
}

// A place in the ring, and the parity of the phase that fills it there.
struct Ring {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

template <int TILES>
__device__ __forceinline__ void copy_panel(Shared& shared, Ring& ring, const u8* panel, u64 policy) {
#pragma unroll 1
  for (int tile = 0; tile < TILES; tile += WARPGROUPS) {
    const int bytes = min(TILES - tile, WARPGROUPS) * TILE_BYTES;
    barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
    barrier_expect(&shared.full[ring.slot], bytes);
    bulk_copy(shared.ring[ring.slot], panel + tile * TILE_BYTES, bytes, &shared.full[ring.slot], policy);
    ring.advance();
  }
}

// One thread feeds the ring.
__device__ __forceinline__ void copy_weights(Shared& shared, const Stretch& own, const Place* places,
                                             const u8* experts) {
  const u64 policy = evict_first_policy();
  Ring ring;
  for (int panel = own.begin1; panel < own.end1; panel++)
    copy_panel<TILES1>(shared, ring,
                       experts + (i64)places[panel / PANELS1].expert * RECORD_BYTES + panel % PANELS1 * PANEL1_BYTES,
                       policy);
  for (int panel = own.begin2; panel < own.end2; panel++)
    copy_panel<TILES2>(shared, ring,
                       experts + (i64)places[panel / PANELS2].expert * RECORD_BYTES + SECOND_BYTES +
                           panel % PANELS2 * PANEL2_BYTES,
                       policy);
}

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

// Sums of a row group: element 4 j + i is of pair 8 j + 2 (lane % 4) + i % 2 and row slot lane / 4 + i / 2 * 8.
typedef float Sums[4 * PARTS];

// The row group of one tile, decoded, times the inputs of the tile.
__device__ __forceinline__ void multiply_fp4(const ComputeWarp& warp, int ring_offset, SharedAddress empty, int slot,
                                             Sums& sums) {
  const uint4 codes[2] = {load_shared_16(warp.codes + ring_offset), load_shared_16(warp.codes + ring_offset + 512)};
  const uint2 scales = load_shared_8(warp.scales + ring_offset);
  uint2 input_scales[PARTS];
#pragma unroll
  for (int j = 0; j < PARTS; j++) input_scales[j] = load_shared_8(warp.own_input_scales + (slot * TILE + 8 * j) * 4);
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(empty);
  constexpr int TOGETHER = SEPARATE<TILE>;
  float scaled[4 * PARTS];
#pragma unroll
  for (int first = 0; first < 4; first += TOGETHER) {
    u32 a[TOGETHER][4];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const uint4 pair = codes[(first + i) / 2];
      decode_fp4((first + i) % 2 ? pair.z : pair.x, a[i][0], a[i][2]);
      decode_fp4((first + i) % 2 ? pair.w : pair.y, a[i][1], a[i][3]);
    }
    float d[TOGETHER][4 * PARTS];
    separate_products<TILE>(d, a, warp.operand + (slot * 4 + first) * BLOCK_STEP<TILE>);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const float low = fp4_scale_of(scales.x, first + i), high = fp4_scale_of(scales.y, first + i);
#pragma unroll
      for (int j = 0; j < 4 * PARTS; j++) {
        const float scale = j % 4 < 2 ? low : high;
        scaled[j] = first + i ? fmaf(scale, d[i][j], scaled[j]) : scale * d[i][j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * PARTS; i++)
    sums[i] = fmaf(bits_to_float(i % 2 ? input_scales[i / 4].y : input_scales[i / 4].x), scaled[i], sums[i]);
}

__device__ __forceinline__ void multiply_fp8(const ComputeWarp& warp, int ring_offset, SharedAddress empty, int slot,
                                             Sums& sums) {
  uint4 codes[4];
#pragma unroll
  for (int q = 0; q < 4; q++) codes[q] = load_shared_16(warp.codes + ring_offset + 512 * q);
  const uint2 scales = load_shared_8(warp.scales + ring_offset);
  uint2 input_scales[PARTS];
#pragma unroll
  for (int j = 0; j < PARTS; j++) input_scales[j] = load_shared_8(warp.own_input_scales + (slot * TILE + 8 * j) * 4);
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(empty);
  u32 a[4][4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    a[q][0] = codes[q].x, a[q][1] = codes[q].z, a[q][2] = codes[q].y, a[q][3] = codes[q].w;
  }
  float d[4 * PARTS];
  chained_products<TILE>(d, a, warp.operand + slot * 4 * BLOCK_STEP<TILE>);
#pragma unroll
  for (int i = 0; i < 4 * PARTS; i++)
    sums[i] = fmaf(bits_to_float(i % 2 ? input_scales[i / 4].y : input_scales[i / 4].x) *
                       bits_to_float(i % 4 < 2 ? scales.x : scales.y),
                   d[i], sums[i]);
}

// A warp's part of a panel, handed over to the finishing warps.
template <int TILES>
__device__ __forceinline__ void compute_panel(Shared& shared, const ComputeWarp& warp, Ring& ring, Ring& buffer) {
  // Where the panels fill the ring a whole number of times, its slots are known to the compiler.
  constexpr bool WHOLE = SLOTS1 % SLOTS == 0 && SLOTS2 % SLOTS == 0;
  constexpr int PANEL_SLOTS = (TILES + WARPGROUPS - 1) / WARPGROUPS;
  Sums sums = {};
#pragma unroll(TILE == 8 ? SLOTS : 1)
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
  float4(*const to)[32] = shared.sums[buffer.slot][warp.group * 4 + warp.row_group];
#pragma unroll
  for (int j = 0; j < PARTS; j++)
    to[j][warp.lane] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
  __syncwarp();
  if (warp.lane == 0) barrier_arrive(&shared.computed[buffer.slot]);
  if (++buffer.slot == BUFFERS) buffer.slot = 0, buffer.parity ^= 1;
}

// The inputs of the first projection: rows of x that are e4m3 already. Pairs that a place lacks repeat its last one.
__device__ __forceinline__ void load_x(Shared& shared, const ComputeWarp& warp, const Place& place, const u8* xq,
                                       const float* xs) {
  constexpr int PIECES = TILE_COLUMNS / 16, EACH = (SLOTS1 * TILE * PIECES + 127) / 128;
  const int thread = warp.row_group * 32 + warp.lane;
  uint4 values[EACH];
  float scales[EACH];
  // All loads are under way before the first is waited for.
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * 128 + thread, piece = at % PIECES, pair = at / PIECES % TILE;
    const int tile = min(at / (PIECES * TILE) * WARPGROUPS + warp.group, TILES1 - 1);
    const int row = shared.pairs[place.first + min(pair, place.count - 1)] / CHOICES;
    values[i] = *(const uint4*)(xq + (i64)row * HIDDEN + tile * TILE_COLUMNS + piece * 16);
    scales[i] = xs[row * TILES1 + tile];
  }
  meet(warp);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * 128 + thread, piece = at % PIECES, pair = at / PIECES % TILE, slot = at / (PIECES * TILE);
    if (slot >= SLOTS1) break;
    *(uint4*)(warp.inputs + slot * INPUT_BYTES + piece * HALF_BYTES + pair * 16) = values[i];
    if (piece == 0) warp.input_scales[slot * TILE + pair] = scales[i];
  }
  shared_proxy_fence();
  meet(warp);
}

#if TAGGED
typedef Tagged H;     // two columns
typedef Tagged Part;  // a float
#else
typedef bf16 H;
typedef float Part;
#endif
constexpr int H_WORDS = TAGGED ? INNER / 2 : INNER;  // of a row: a tag's word has four bytes of data

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

#if TAGGED
__device__ __forceinline__ void load_columns(const ComputeWarp& warp, const H* row, Columns& columns) {
  for (bool complete = false; !complete;) {
    complete = true;
#pragma unroll
    for (int slot = 0; slot < SLOTS2; slot++) {
      const int tile = slot * WARPGROUPS + warp.group;
      if (tile >= TILES2) continue;
      Tagged words[4];
      load_tagged(row + (tile * TILE_COLUMNS + warp.lane % 16 * 8) / 2, words[0], words[1]);
      load_tagged(row + (tile * TILE_COLUMNS + warp.lane % 16 * 8) / 2 + 2, words[2], words[3]);
      columns[slot] = {words[0].data, words[1].data, words[2].data, words[3].data};
      complete &= words[0].tag & words[1].tag & words[2].tag & words[3].tag;
    }
    if (!complete) pause(20);
  }
  __syncwarp();
}
#else
__device__ __forceinline__ void load_columns(const ComputeWarp& warp, const H* row, Columns& columns) {
#pragma unroll
  for (int slot = 0; slot < SLOTS2; slot++) {
    const int tile = slot * WARPGROUPS + warp.group;
    if (tile < TILES2) columns[slot] = load_fresh(row + tile * TILE_COLUMNS + warp.lane % 16 * 8);
  }
}
#endif

// The inputs of the second projection, once all panels of the place's first one are done.
__device__ __forceinline__ void load_h(const ComputeWarp& warp, const Place& place, const H* h, const u32* counter) {
  if (!TAGGED && warp.row_group == 0 && warp.lane == 0)
    while (load_acquire(counter) < (u32)PANELS1) pause(20);
  meet(warp);
  // A warp has two pairs at a time, half a warp each.
#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    const int pair = part * 8 + warp.row_group * 2 + warp.lane / 16;
    Columns columns;
    load_columns(warp, h + (i64)(place.first + min(pair, place.count - 1)) * H_WORDS, columns);
#pragma unroll
    for (int slot = 0; slot < SLOTS2; slot++)
      if (slot * WARPGROUPS + warp.group < TILES2) round_columns(warp, columns[slot], slot, pair);
  }
  shared_proxy_fence();
  meet(warp);
}

__device__ __forceinline__ void compute(Shared& shared, const Stretch& own, const Place* places, const u8* xq,
                                        const float* xs, const H* h, const u32* counters) {
  const int index = threadIdx.x / 32;
  ComputeWarp warp;
  warp.group = index / 4, warp.row_group = index % 4, warp.lane = threadIdx.x % 32;
  warp.inputs = shared.inputs[warp.group];
  warp.input_scales = shared.input_scales[warp.group];
  // The shuffle tells the compiler that it is the same in all lanes.
  warp.operand = __shfl_sync(0xFFFFFFFFu, (u32)product_operand(warp.inputs, HALF_BYTES, 128), 0);
  const u8* const tile = shared.ring[0] + warp.group * TILE_BYTES;
  const u8* const rows = tile + warp.row_group * ROW_GROUP_BYTES;
  warp.codes = fixed_address(rows + 16 * warp.lane);
  warp.scales = fixed_address(FP8 ? tile + 4 * ROW_GROUP_BYTES : rows + 1024 + warp.lane / 4 * 8);
  warp.own_input_scales = fixed_address(warp.input_scales + warp.lane % 4 * 2);
  warp.full = fixed_address(shared.full), warp.empty = fixed_address(shared.empty);
  Ring ring, buffer;
  int place = -1;
#pragma unroll 1
  for (int panel = own.begin1; panel < own.end1; panel++) {
    if (panel / PANELS1 != place) {
      place = panel / PANELS1;
      load_x(shared, warp, places[place], xq, xs);
    }
    compute_panel<TILES1>(shared, warp, ring, buffer);
  }
  place = -1;
#pragma unroll 1
  for (int panel = own.begin2; panel < own.end2; panel++) {
    if (panel / PANELS2 != place) {
      place = panel / PANELS2;
      load_h(warp, places[place], h, counters + (&places[place] - shared.places));
    }
    compute_panel<TILES2>(shared, warp, ring, buffer);
  }
}

// The sums of a row group over the four warpgroups, in their order.
__device__ __forceinline__ void collect(const Shared& shared, int buffer, int row_group, int lane, Sums& sums) {
#pragma unroll
  for (int j = 0; j < PARTS; j++) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int group = 0; group < WARPGROUPS; group++) {
      const float4 part = shared.sums[buffer][group * 4 + row_group][j][lane];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    constexpr float TIMES = FP8 ? 1.0f : FP4_DECODED_TIMES;
    sums[4 * j] = sum.x * TIMES, sums[4 * j + 1] = sum.y * TIMES;
    sums[4 * j + 2] = sum.z * TIMES, sums[4 * j + 3] = sum.w * TIMES;
  }
}

// Two neighbouring parts of a row's choice.
__device__ __forceinline__ float2 load_parts(const Part* from) {
#if TAGGED
  Tagged words[2];
  for (;;) {
    load_tagged(from, words[0], words[1]);
    if (words[0].tag & words[1].tag) break;
    pause(20);
  }
  return {bits_to_float(words[0].data), bits_to_float(words[1].data)};
#elif defined(DSV4C_EMULATE)
  return *(const float2*)from;
#else
  float2 values;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "l"(from) : "memory");
  return values;
#endif
}

// A row's sum over its choices, of the 64 columns that this panel is of: by the warp that finished the last of their
// parts, in the order of the choices.
__device__ __forceinline__ void sum_choices(int row, int panel, int lane, const Part* parts, float* out) {
  const int column = panel * PANEL_ROWS + 2 * lane;
  float2 values[CHOICES];
#pragma unroll
  for (int choice = 0; choice < CHOICES; choice++)
    values[choice] = load_parts(parts + (i64)(row * CHOICES + choice) * HIDDEN + column);
  float2 sum = {0, 0};
#pragma unroll
  for (int choice = 0; choice < CHOICES; choice++) sum.x += values[choice].x, sum.y += values[choice].y;
  *(float2*)(out + (i64)row * OUT_STRIDE + column) = sum;
}

// Pair i of the 2 PARTS that a lane has sums of.
__device__ __forceinline__ int pair_of(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

// Two row groups of the first projection: their h, 16 columns from `column` on. With tags, a lane and the one of the next
// row slot exchange halves, so that each has two neighbouring columns.
__device__ __forceinline__ void finish_product(const Place& place, int column, int lane, const Sums (&sums)[2],
                                               const float (&weights)[2 * PARTS], H* h) {
#pragma unroll
  for (int i = 0; i < 2 * PARTS; i++) {
    bf16 products[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      products[j] = to_bf16(gated(sums[j][i / 2 * 4 + i % 2], sums[j][i / 2 * 4 + 2 + i % 2]) * weights[i]);
    H* const row = h + (i64)(place.first + pair_of(i, lane)) * H_WORDS;
#if TAGGED
    const bool odd = lane / 4 % 2;
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, (u32)products[!odd].bits, 4), own = products[odd].bits;
    if (pair_of(i, lane) < place.count)
      store_tagged(row + (column + odd * 8 + lane / 8 * 2) / 2, odd ? own << 16 | other : other << 16 | own);
#else
    if (pair_of(i, lane) < place.count) row[column + lane / 4] = products[0], row[column + 8 + lane / 4] = products[1];
#endif
  }
}

__device__ __forceinline__ void store_part(float* to, float value) { *to = value; }
__device__ __forceinline__ void store_part(Tagged* to, float value) { store_tagged(to, float_to_bits(value)); }

// A row group of the second projection: the parts of the rows of its pairs.
__device__ __forceinline__ void finish_parts(const Place& place, const int* pairs, int row, int lane, const Sums& sums,
                                             Part* parts) {
#pragma unroll
  for (int i = 0; i < 2 * PARTS; i++) {
    if (pair_of(i, lane) >= place.count) continue;
    Part* const to = parts + (i64)pairs[place.first + pair_of(i, lane)] * HIDDEN + row + lane / 4;
    store_part(to, sums[i / 2 * 4 + i % 2]);
    store_part(to + 8, sums[i / 2 * 4 + 2 + i % 2]);
  }
}

// Counts the parts of a panel; who finds them complete for a row adds them up. Tagged parts may still be on their way.
__device__ __forceinline__ void count_parts(const Place& place, const int* pairs, int panel, int lane, const Part* parts,
                                            u32* rows_done, float* out) {
  __syncwarp();
  if (!TAGGED) global_fence();
  const int row = lane < place.count ? pairs[place.first + lane] / CHOICES : 0;
  bool last = false;
  if (lane < place.count) last = fetch_add(&rows_done[row * PANELS2 + panel], 1) == CHOICES - 1;
  u32 left = __ballot_sync(0xFFFFFFFFu, last);
  if (left && !TAGGED) global_fence();
  for (; left; left &= left - 1)
    sum_choices(__shfl_sync(0xFFFFFFFFu, row, __ffs(left) - 1), panel, lane, parts, out);
}

__device__ __forceinline__ void finish(Shared& shared, const Stretch& own, const Place* places, const float* pair_weights,
                                       H* h, Part* parts, u32* counters, float* out) {
  const int lane = threadIdx.x % 32, warp = (int)threadIdx.x / 32 - FIRST_FINISH_WARP;
  const int panels1 = own.end1 - own.begin1, panels2 = own.end2 - own.begin2;
  int next = warp;  // counted through the block's panels of both projections
  u32 parity = 0;
  float weights[2 * PARTS];
  int of_place = -1;
#pragma unroll 1
  for (; next < panels1 + panels2; next += FINISH_WARPS, parity ^= 1) {
    const bool first = next < panels1;
    const int panel = first ? own.begin1 + next : own.begin2 + next - panels1;
    const int number = panel / (first ? PANELS1 : PANELS2), own_panel = panel % (first ? PANELS1 : PANELS2);
    const Place& place = places[number];
    if (first && number != of_place) {
      of_place = number;
#pragma unroll
      for (int i = 0; i < 2 * PARTS; i++)
        weights[i] = pair_of(i, lane) < place.count ? pair_weights[shared.pairs[place.first + pair_of(i, lane)]] : 0.0f;
    }
    barrier_wait(&shared.computed[warp], parity);
#pragma unroll
    for (int row_group = 0; row_group < ROW_GROUPS; row_group += 2) {
      Sums sums[2];
      collect(shared, warp, row_group, lane, sums[0]);
      collect(shared, warp, row_group + 1, lane, sums[1]);
      if (first) {
        finish_product(place, own_panel * 32 + row_group * 8, lane, sums, weights, h);
      } else {
        finish_parts(place, shared.pairs, own_panel * 64 + row_group * 16, lane, sums[0], parts);
        finish_parts(place, shared.pairs, own_panel * 64 + row_group * 16 + 16, lane, sums[1], parts);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.finished[warp]);
    if (!first) count_parts(place, shared.pairs, own_panel, lane, parts, counters + MOST_PLACES, out);
    else if (!TAGGED && lane == 0) add_release(&counters[&place - shared.places], 1);
  }
}

// What the launch before wrote is not __restrict__: loads of it must not move in front of the wait for that launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_stream(const u8* xq, const float* xs, const float* pair_weights,
               const int* list, const Place* places, const int* heads,
#if GROUPS > 1
               const int* __restrict__ topology,
#endif
               const u8* __restrict__ experts, H* h, Part* parts, u32* counters, float* __restrict__ out,
               const StepHeader* __restrict__ step) {
#ifdef DSV4C_EMULATE
  u8* const memory = emulate::dynamic_shared;
#else
  extern __shared__ __align__(128) u8 memory[];
#endif
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32;
  if (thread == 0) {
    for (int slot = 0; slot < SLOTS; slot++)
      barrier_init(&shared.full[slot], 1), barrier_init(&shared.empty[slot], COMPUTE_WARPS);
    for (int buffer = 0; buffer < BUFFERS; buffer++)
      barrier_init(&shared.computed[buffer], COMPUTE_WARPS), barrier_init(&shared.finished[buffer], 1);
    barrier_init_fence();
  }
  launch_dependents();
  wait_for_launch_before();
  // All at once, whatever the lists hold: one way to memory and back.
#if GROUPS > 1
  const int* const own = topology + EXPERTS + GROUPS + 1 + 3 * blockIdx.x;
  const int group = own[0], index = own[1], blocks = own[2];
#else
  const int group = 0, index = blockIdx.x, blocks = SMS;
#endif
  const int first_place = GROUPS > 1 ? heads[group] : 0, places_hit = heads[group + 1] - first_place;
  for (int i = thread; i < MOST_PLACES; i += THREADS) *(int4*)&shared.places[i] = *(const int4*)&places[i];
  for (int i = thread; i < PAIRS; i += THREADS) shared.pairs[i] = list[i];
  __syncthreads();

  const Stretch stretch = stretch_of(places_hit, index, blocks);
  const Place* const own_places = shared.places + first_place;
  if (warp < COMPUTE_WARPS) {
    compute(shared, stretch, own_places, xq, xs, h, counters);
  } else if (warp == COPY_WARP) {
    if (thread % 32 == 0) copy_weights(shared, stretch, own_places, experts);
  } else {
    finish(shared, stretch, own_places, pair_weights, h, parts, counters, out);
  }
}
