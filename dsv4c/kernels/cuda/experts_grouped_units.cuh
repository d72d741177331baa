// Who computes what: blocks draw units of work one after the other, in an order that all know.
//
// First all strips of w13, place by place, so that blocks that share inputs run at the same time; then all of w2, strip
// by strip, so that the parts of a strip of the result can be added up while L2 still has them. Every second strip goes
// through the places backwards: it begins with the h that was used last.
//
// A block that waits for h waits for units that were drawn before its own, by blocks that run, and which themselves
// wait for nothing before they are done with w13: there is always one that can go on. The order of drawing has no part
// in the results.
#pragma once

#include "experts_grouped.cuh"

// The places that this block's group of SMs has.
struct Share {
  int group, first_place, places;
};

__device__ __forceinline__ Unit describe(const Share& share, int number) {
  Unit unit;
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
__device__ __forceinline__ void announce(const Unit& unit, const Counters& counters) {
  if (threadIdx.x % LANES == 0)
    add_release(unit.kind == FIRST ? counters.place(unit.place) : counters.strip(unit.strip), 1);
  __syncwarp();
}

// A warp draws the block's units, one ahead of those who work, and announces what these have done: they need not wait
// until it has reached the other blocks.
__device__ __forceinline__ void draw_units(Shared& shared, const Share& share, const Inputs& inputs,
                                           const Counters& counters) {
  const int lane = threadIdx.x % LANES;
  Ring<UNITS> ring;
  int drawn = 0;
  for (int kind = FIRST; kind != END; drawn++, ring.advance()) {
    Unit& unit = shared.units[ring.slot];
    barrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
    if (drawn >= UNITS) announce(unit, counters);
    u32 number = 0;
    if (lane == 0) number = fetch_add_acq_rel(counters.next_unit(share.group), 1);
    const Unit next = describe(share, (int)__shfl_sync(FULL_MASK, number, 0));
    kind = next.kind;
    if (kind != END) {
      const Place place = inputs.places[next.place];
      const int width = width_of(place.count);
      for (int i = lane; i < width; i += LANES) {
        const int index = place.first + min(i, place.count - 1), pair = inputs.list[index];
        unit.pairs[i] = pair;
        unit.weights[i] = inputs.pair_weights[pair];
        unit.rows[i] = kind == FIRST ? (u32)(pair / CHOICES) * HIDDEN : (u32)index * INNER;
      }
      if (lane == 0) unit.expert = place.expert, unit.first = place.first, unit.count = place.count, unit.width = width;
    }
    if (lane == 0) unit.kind = kind, unit.strip = next.strip, unit.place = next.place, unit.sums_end = next.sums_end;
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.unit_full[ring.slot]);
  }
  // The last one before the end.
  static_assert(UNITS == 2);
  if (drawn < 2) return;
  barrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
  announce(shared.units[ring.slot], counters);
}
