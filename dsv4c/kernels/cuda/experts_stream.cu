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
// Macros: FP8 (0: FP4), HIDDEN, INNER, EXPERTS, CHOICES, RECORD_BYTES (from one expert to the next), LIMIT, SMS, GROUPS (of
// SMs that share places), TILE (pairs of a place: 8 or 16), ROWS (the bucket's), OUT_STRIDE, SLOTS (of the ring),
// HALVES (1: the places are done in two halves), SHARED_BYTES; for measuring, STREAM_ONLY 1 leaves the products out.
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

// A run of panels, counted through those of all places.
struct Run {
  int begin, end;
  __device__ __forceinline__ int count() const { return end - begin; }
};

// What a block does, in this order: its panels of w13 of the first half of the places, of the second half, then of w2. So
// h of the first half is ready when it is wanted, and that of the second by the time the first is done.
struct Stretch {
  Run first[2], second[2];  // by halves
};

__device__ __forceinline__ int count(const Run (&halves)[2]) { return halves[0].count() + halves[1].count(); }
// Panel `index` of those of both halves.
__device__ __forceinline__ int panel_of(const Run (&halves)[2], int index) {
  const int half = halves[0].count();
  return index < half ? halves[0].begin + index : halves[1].begin + index - half;
}

struct Shared {
  u8 ring[SLOTS][SLOT_BYTES];
  u8 inputs[WARPGROUPS][MOST_SLOTS * INPUT_BYTES];
  float input_scales[WARPGROUPS][MOST_SLOTS * TILE];
  float4 sums[BUFFERS][COMPUTE_WARPS][PARTS][32];
  Place places[MOST_PLACES];
  int pairs[PAIRS];
  Stretch own;
  u64 full[SLOTS], empty[SLOTS];
  u64 computed[BUFFERS], finished[BUFFERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the selector knows another size");

__device__ __forceinline__ int share(int total, int index, int blocks) { return (int)((i64)total * index / blocks); }

// The slots before block `index` of `blocks` are its share of all: those of w13, then as many of w2 as are left. Where
// there is too little work to divide it so, there is no first half, or both projections are shared evenly.
__device__ __forceinline__ Stretch stretch_of(int places, int index, int blocks) {
  const int panels1 = places * PANELS1, panels2 = places * PANELS2, slots = panels1 * SLOTS1 + panels2 * SLOTS2;
  const int most1 = (panels1 + blocks - 1) / blocks, least2 = (slots / blocks - most1 * SLOTS1) / SLOTS2 - 1;
  const int half = places / 2;
  const bool halves = HALVES && panels1 / blocks >= (half * PANELS1 + blocks - 1) / blocks &&
                      least2 >= (half * PANELS2 + blocks - 1) / blocks;
  const int half1 = halves ? half * PANELS1 : 0, half2 = halves ? half * PANELS2 : 0;
  int ends[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int all1 = share(panels1, index + i, blocks);
    const int all2 = least2 >= 0 ? (share(slots, index + i, blocks) - all1 * SLOTS1) / SLOTS2
                                 : share(panels2, index + i, blocks);
    ends[i][0] = share(half1, index + i, blocks), ends[i][1] = half1 + all1 - ends[i][0];
    ends[i][2] = share(half2, index + i, blocks), ends[i][3] = half2 + all2 - ends[i][2];
  }
  return {{{ends[0][0], ends[1][0]}, {ends[0][1], ends[1][1]}}, {{ends[0][2], ends[1][2]}, {ends[0][3], ends[1][3]}}};
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
__device__ __forceinline__ void copy_weights(Shared& shared, const Place* places,
                                             const u8* experts) {
  const Stretch& own = shared.own;
  const u64 policy = evict_first_policy();
  Ring ring;
  for (int i = 0; i < count(own.first); i++) {
    const int panel = panel_of(own.first, i);
    const u8* const expert = experts + (i64)places[panel / PANELS1].expert * RECORD_BYTES;
    copy_panel<TILES1>(shared, ring, expert + panel % PANELS1 * PANEL1_BYTES, policy);
  }
  for (int i = 0; i < count(own.second); i++) {
    const int panel = panel_of(own.second, i);
    const u8* const expert = experts + (i64)places[panel / PANELS2].expert * RECORD_BYTES + SECOND_BYTES;
    copy_panel<TILES2>(shared, ring, expert + panel % PANELS2 * PANEL2_BYTES, policy);
  }
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
  // A product at a time, though the four share their scales: in a chain the tensor cores keep fewer bits of the sum.
  constexpr int TOGETHER = SEPARATE<TILE>;
  float sum[4 * PARTS];
#pragma unroll
  for (int first = 0; first < 4; first += TOGETHER) {
    u32 a[TOGETHER][4];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const uint4 own = codes[first + i];
      a[i][0] = own.x, a[i][1] = own.z, a[i][2] = own.y, a[i][3] = own.w;
    }
    float d[TOGETHER][4 * PARTS];
    separate_products<TILE>(d, a, warp.operand + (slot * 4 + first) * BLOCK_STEP<TILE>);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int j = 0; j < 4 * PARTS; j++) sum[j] = first + i ? sum[j] + d[i][j] : d[i][j];
  }
#pragma unroll
  for (int i = 0; i < 4 * PARTS; i++)
    sums[i] = fmaf(bits_to_float(i % 2 ? input_scales[i / 4].y : input_scales[i / 4].x) *
                       bits_to_float(i % 4 < 2 ? scales.x : scales.y),
                   sum[i], sums[i]);
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

// The inputs of the first projection: rows of x that are e4m3 already. What is in the columns of pairs that the place lacks
// does not matter.
__device__ __forceinline__ void load_x(Shared& shared, const ComputeWarp& warp, const Place& place, const u8* xq,
                                       const float* xs) {
  constexpr int PIECES = TILE_COLUMNS / 16, EACH = (SLOTS1 * TILE * PIECES + 127) / 128;
  const int thread = warp.row_group * 32 + warp.lane;
  uint4 values[EACH];
  float scales[EACH];
  // All loads are under way before the first is waited for.
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * 128 + thread, piece = at % PIECES, pair = min(at / PIECES % TILE, place.count - 1);
    const int tile = min(at / (PIECES * TILE) * WARPGROUPS + warp.group, TILES1 - 1);
    const int row = shared.pairs[place.first + pair] / CHOICES;
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
  // A warp has two pairs at a time, half a warp each.
#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    const int pair = part * 8 + warp.row_group * 2 + warp.lane / 16;
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
  Ring ring, buffer;
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
__device__ __forceinline__ float2 load_parts(const float* from) {
#ifdef DSV4C_EMULATE
  return *(const float2*)from;
#else
  float2 values;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "l"(from) : "memory");
  return values;
#endif
}

// A row's sum over its choices, of the 64 columns that this panel is of: by the warp that finished the last of their
// parts, in the order of the choices.
__device__ __forceinline__ void sum_choices(int row, int panel, int lane, const float* parts, float* out) {
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

// Two row groups of the first projection: their h, 16 columns from `column` on.
__device__ __forceinline__ void finish_product(const Place& place, int column, int lane, const Sums (&sums)[2],
                                               const float (&weights)[2 * PARTS], bf16* h) {
#pragma unroll
  for (int i = 0; i < 2 * PARTS; i++) {
    bf16 products[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      products[j] = to_bf16(gated(sums[j][i / 2 * 4 + i % 2], sums[j][i / 2 * 4 + 2 + i % 2]) * weights[i]);
    bf16* const row = h + (i64)(place.first + pair_of(i, lane)) * INNER;
    if (pair_of(i, lane) < place.count) row[column + lane / 4] = products[0], row[column + 8 + lane / 4] = products[1];
  }
}

// A row group of the second projection: the parts of the rows of its pairs.
__device__ __forceinline__ void finish_parts(const Place& place, const int* pairs, int row, int lane, const Sums& sums,
                                             float* parts) {
#pragma unroll
  for (int i = 0; i < 2 * PARTS; i++) {
    if (pair_of(i, lane) >= place.count) continue;
    float* const to = parts + (i64)pairs[place.first + pair_of(i, lane)] * HIDDEN + row + lane / 4;
    to[0] = sums[i / 2 * 4 + i % 2];
    to[8] = sums[i / 2 * 4 + 2 + i % 2];
  }
}

// Counts the parts of a panel; who finds them complete for a row adds them up.
__device__ __forceinline__ void count_parts(const Place& place, const int* pairs, int panel, int lane, const float* parts,
                                            u32* rows_done, float* out) {
  __syncwarp();
  global_fence();
  const int row = lane < place.count ? pairs[place.first + lane] / CHOICES : 0;
  bool last = false;
  if (lane < place.count) last = fetch_add(&rows_done[row * PANELS2 + panel], 1) == CHOICES - 1;
  u32 left = __ballot_sync(0xFFFFFFFFu, last);
  if (left) global_fence();
  for (; left; left &= left - 1)
    sum_choices(__shfl_sync(0xFFFFFFFFu, row, __ffs(left) - 1), panel, lane, parts, out);
}

__device__ __forceinline__ void finish(Shared& shared, const Place* places, const float* pair_weights,
                                       bf16* h, float* parts, u32* counters, float* out) {
  const Stretch& own = shared.own;
  const int lane = threadIdx.x % 32, warp = (int)threadIdx.x / 32 - FIRST_FINISH_WARP;
  const int panels1 = count(own.first), panels = panels1 + count(own.second);
  int next = warp;  // counted through the block's panels of both projections
  u32 parity = 0;
  float weights[2 * PARTS];
  int of_place = -1;
#pragma unroll 1
  for (; next < panels; next += FINISH_WARPS, parity ^= 1) {
    const bool first = next < panels1;
    const int panel = first ? panel_of(own.first, next) : panel_of(own.second, next - panels1);
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
    else if (lane == 0) add_release(&counters[&place - shared.places], 1);
  }
}

// What the launch before wrote is not __restrict__: loads of it must not move in front of the wait for that launch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_stream(const u8* xq, const float* xs, const float* pair_weights,
               const int* list, const Place* places, const int* heads,
#if GROUPS > 1
               const int* __restrict__ topology,
#endif
               const u8* __restrict__ experts, bf16* h, float* parts, u32* counters, float* __restrict__ out,
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
  if (thread == 0) shared.own = stretch_of(places_hit, index, blocks);
  __syncthreads();

  const Place* const own_places = shared.places + first_place;
  if (warp < COMPUTE_WARPS) {
    compute(shared, own_places, xq, xs, h, counters);
  } else if (warp == COPY_WARP) {
    if (thread % 32 == 0) copy_weights(shared, own_places, experts);
  } else {
    finish(shared, own_places, pair_weights, h, parts, counters, out);
  }
}
