// What the kernels of larger steps share (experts_grouped.cu, experts_prefill.cu): who computes what.
//
// A unit of work is a strip of a matrix times the pairs of a place. Blocks draw units one after the other, in an order
// that all know: first all strips of w13, place by place, so that blocks that share inputs run at the same time; then
// all of w2, strip by strip, so that the parts of a strip of the result can be added up while L2 still has them. Every
// second strip goes through the places backwards: it begins with the h that was used last.
//
// A block that waits for h waits for units that were drawn before its own, by blocks that run, and which themselves
// wait for nothing that a running block would not do: there is always one that can go on. The order of drawing has no
// part in the results.
//
// Macros: HIDDEN, INNER, EXPERTS, CHOICES, GROUPS (of SMs that share places), TILE (pairs of a place), ROWS (the
// bucket's), LIMIT, SMS, OUT_STRIDE, and those of experts_packed.cuh; WEIGHTS_STAGES, of a ring
// of weights, is the including kernel's.
#pragma once

#include "block.cuh"
#include "experts_packed.cuh"
#include "hopper_product.cuh"

static_assert(TILE % 16 == 0 && TILE <= 128 && HIDDEN % 128 == 0 && INNER % 128 == 0);

// A strip is four panels. One of w13 makes 128 columns of h, which share a scale; the last of w2 may have two panels.
constexpr int PANELS = 4;
constexpr int STRIPS1 = PANELS1 / PANELS, STRIPS2 = (PANELS2 + PANELS - 1) / PANELS;
constexpr int STRIP_COLUMNS = PANELS * PANEL_ROWS;  // of the result

// The warps: a warpgroup for each panel multiplies; four more warps bring what these need. Of the registers that a block
// starts with those that multiply take over what the others can spare.
constexpr int MULTIPLY_WARPS = 4 * PANELS, MULTIPLY_THREADS = 32 * MULTIPLY_WARPS;
constexpr int THREADS = MULTIPLY_THREADS + 4 * 32, START_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int MULTIPLY_REGISTERS = 112, OTHER_REGISTERS = 32;
static_assert(MULTIPLY_THREADS * MULTIPLY_REGISTERS + (THREADS - MULTIPLY_THREADS) * OTHER_REGISTERS ==
              THREADS * START_REGISTERS);
constexpr int ROW_GROUPS = 4 * PANELS;  // of a strip

// Pairs that a place is computed for: its own, rounded up to what products are compiled for.
#if TILE > 64
#define FOR_EACH_WIDTH(F) F(16) F(32) F(48) F(64) F(72) F(80) F(88) F(96) F(104) F(112) F(120) F(128)
__device__ __forceinline__ int width_of(int pairs) {
  return pairs <= 64 ? (pairs + 15) / 16 * 16 : (pairs + 7) / 8 * 8;
}
#else
#define FOR_EACH_WIDTH(F) F(8) F(16) F(24) F(32) F(40) F(48) F(56) F(64)
__device__ __forceinline__ int width_of(int pairs) { return (pairs + 7) / 8 * 8; }
#endif

enum UnitKind { FIRST, SECOND, END };

// What every unit has; a kernel adds what it keeps of a pair's inputs.
struct __align__(16) UnitBase {
  int kind;  // of which projection; END: there are no more
  int strip;
  int place, expert, first, count;  // the place, its part of the list
  int width;                        // width_of(count)
  int sums_end;  // strips of the result before this one are to be added up first
  int pairs[TILE];  // those that are missing repeat the last
  float weights[TILE];
};
constexpr int UNITS = 2;  // the one that is multiplied, and the next

constexpr int PAIRS = ROWS * CHOICES, PAIRS_HIT = PAIRS < EXPERTS ? PAIRS : EXPERTS;
constexpr int MOST_PLACES = PAIRS_HIT + (PAIRS - PAIRS_HIT) / TILE;

__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
  while (load_acquire(counter) < count) pause(50);
}

// The places that this block's group of SMs has.
struct Share {
  int group, first_place, places;
};

// Kind, strip, place and sums_end of a unit.
__device__ __forceinline__ UnitBase describe(const Share& share, int number) {
  UnitBase unit;
  const int first_units = share.places * STRIPS1, second = number - first_units;
  if (number < first_units) {
    unit.kind = FIRST;
    unit.place = number / STRIPS1, unit.strip = number % STRIPS1;
    unit.sums_end = 0;
  } else if (second < share.places * STRIPS2) {
    unit.kind = SECOND;
    unit.strip = second / share.places;
    const int place = second % share.places;
    unit.place = unit.strip % 2 ? share.places - 1 - place : place;
    // Units of the strip before may still be under way, those before that hardly.
    unit.sums_end = max(0, unit.strip - 1);
  } else {
    unit.kind = END;
    unit.place = unit.strip = 0;
    unit.sums_end = STRIPS2;
  }
  unit.place += share.first_place;
  return unit;
}

// A unit is done, and what the warps of the block have written for it is there: for the others too, behind this.
template <typename Counters>
__device__ __forceinline__ void announce(const UnitBase& unit, const Counters& counters) {
  if (threadIdx.x % LANES == 0)
    add_release(unit.kind == FIRST ? counters.place(unit.place) : counters.strip(unit.strip), 1);
  __syncwarp();
}

// A warp draws the block's units, one ahead of those who work, and announces what these have done: they need not wait
// until it has reached the other blocks. All its lanes arrive at `unit_full`.
template <typename Shared, typename Inputs, typename Counters>
__device__ __forceinline__ void draw_units(Shared& shared, const Share& share, const Inputs& inputs,
                                           const Counters& counters) {
  const int lane = threadIdx.x % LANES;
  Ring<UNITS> ring;
  int drawn = 0;
  for (int kind = FIRST; kind != END; drawn++, ring.advance()) {
    auto& unit = shared.units[ring.slot];
    barrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
    if (drawn >= UNITS) announce(unit, counters);
    u32 number = 0;
    if (lane == 0) number = fetch_add_acq_rel(counters.next_unit(share.group), 1);
    const UnitBase next = describe(share, (int)__shfl_sync(FULL_MASK, number, 0));
    kind = next.kind;
    if (kind != END) {
      const Place place = inputs.places[next.place];
      const int width = width_of(place.count);
      for (int i = lane; i < width; i += LANES) {
        const int index = place.first + min(i, place.count - 1), pair = inputs.list[index];
        unit.pairs[i] = pair;
        unit.weights[i] = inputs.pair_weights[pair];
        unit.set_input(i, kind, pair, index, inputs);
      }
      if (lane == 0) unit.expert = place.expert, unit.first = place.first, unit.count = place.count, unit.width = width;
    }
    if (lane == 0) unit.kind = kind, unit.strip = next.strip, unit.place = next.place, unit.sums_end = next.sums_end;
    barrier_arrive(&shared.unit_full[ring.slot]);
  }
  // The last one before the end.
  static_assert(UNITS == 2);
  if (drawn < 2) return;
  barrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
  announce(shared.units[ring.slot], counters);
}

// A warp copies the weights of the block's units into a ring of WEIGHTS_STAGES, to the tiles `weights_of` a stage's
// panels. They do not wait for h: those of the next unit are on their way while its inputs are still being made.
template <typename Shared>
__device__ __forceinline__ void copy_weights(Shared& shared, const u8* experts) {
  const int lane = threadIdx.x % LANES;
  const u64 policy = evict_first_policy();
  Ring<UNITS> units;
  Ring<WEIGHTS_STAGES> ring;
  while (true) {
    barrier_wait(&shared.unit_full[units.slot], units.parity);
    const UnitBase& unit = shared.units[units.slot];
    if (unit.kind == END) return;
    const bool second = unit.kind == SECOND;
    const int first_panel = unit.strip * PANELS, tiles = second ? TILES2 : TILES1;
    const int panels = second ? min(PANELS, PANELS2 - first_panel) : PANELS;
    const int panel = first_panel + lane;
    const u8* from = experts + (i64)unit.expert * RECORD_BYTES +
                     (second ? SECOND_BYTES + panel * PANEL2_BYTES : panel * PANEL1_BYTES);
    for (int tile = 0; tile < tiles; tile++, from += TILE_BYTES, ring.advance()) {
      u64* const full = &shared.weights_full[ring.slot];
      barrier_wait(&shared.weights_empty[ring.slot], ring.parity ^ 1);
      if (lane == 0) barrier_expect(full, panels * TILE_BYTES);
      __syncwarp();
      if (lane < panels) bulk_copy(shared.weights_of(ring.slot, lane), from, TILE_BYTES, full, policy);
    }
    units.advance();
  }
}
