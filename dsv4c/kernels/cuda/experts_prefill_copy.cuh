// The warp that fills the ring of inputs, and the one that packs them by place.
#pragma once

#include "async.cuh"
#include "experts_prefill.cuh"

// Inputs wait until they are packed, or until the h of their place is complete.
__device__ __forceinline__ void copy_inputs(Shared& shared, const Results& results, const Counters& counters) {
  if (threadIdx.x % LANES) return;
  Ring<UNITS> units;
  Ring<INPUTS_STAGES> ring;
  while (true) {
    barrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit& unit = shared.units[units.slot];
    if (unit.kind == END) return;
    const bool second = unit.kind == SECOND;
    const int tiles = second ? TILES2 : TILES1, bytes = unit.width * PAIR_BYTES;
    const u8* from = (second ? results.h : results.packed) + begin_of(unit.place, unit.first) * tiles * PAIR_BYTES;
    wait_for_count(second ? counters.place(unit.place) : counters.packed(unit.place), second ? STRIPS1 : PACKED_PARTS);
    global_proxy_fence();
    for (int tile = 0; tile < tiles; tile++, from += bytes, ring.advance()) {
      u64* const full = &shared.inputs_full[ring.slot];
      barrier_wait(&shared.inputs_empty[ring.slot], ring.parity ^ 1);
      barrier_expect(full, bytes);
      bulk_copy(shared.inputs[ring.slot].pieces, from, bytes, full);
    }
    units.advance();
  }
}

// Draws parts of the inputs of a place, some columns of all its pairs, and copies them from the rows to where its units
// read them, eight pairs at a time: while some come, those before leave. It waits for nobody.
__device__ __forceinline__ void pack_inputs(Shared& shared, const Share& share, const Inputs& inputs, u8* packed,
                                            const Counters& counters) {
  const int lane = threadIdx.x % LANES, own_pair = lane % 8, own_piece = lane / 8;
  u8* const own = shared.packing[0][0] + lane * 16;
  const auto draw = [&] { return lane == 0 ? (int)fetch_add(counters.next_part(share.group), 1) : 0; };
  int next = draw();
  while (true) {
    const int number = __shfl_sync(FULL_MASK, next, 0);
    if (number >= share.places * PACKED_PARTS) return;
    next = draw();
    const int index = share.first_place + number / PACKED_PARTS, first_tile = number % PACKED_PARTS * PART_TILES;
    const int copies = min(PART_TILES, TILES1 - first_tile) * (PIECES / 4);
    const Place place = inputs.places[index];
    const int width = width_of(place.count);
    const u8* const from = inputs.rows + first_tile * PAIR_BYTES + own_piece * 16;
    u8* const to = packed + (begin_of(index, place.first) * TILES1 + first_tile * width) * PAIR_BYTES +
                   (own_piece * width + own_pair) * 16;
    const auto start = [&](int pair) {
      if (pair < width) {
        // Those that are missing repeat the last.
        const int row = inputs.list[place.first + min(pair + own_pair, place.count - 1)] / CHOICES;
        const u8* const row_from = from + (i64)row * (HIDDEN * 2);
#pragma unroll
        for (int i = 0; i < PART_COPIES; i++)
          if (i < copies) cp_async_16(own + (pair / 8 % 2 * PART_COPIES + i) * 512, row_from + i * 64);
      }
      cp_async_commit();
    };
    start(0);
#pragma unroll 1
    for (int pair = 0; pair < width; pair += 8) {
      start(pair + 8);
      cp_async_wait<1>();
#pragma unroll
      for (int i = 0; i < PART_COPIES; i++)
        if (i < copies)
          *(uint4*)(to + (i * 4 * width + pair) * 16) = *(const uint4*)(own + (pair / 8 % 2 * PART_COPIES + i) * 512);
    }
    global_proxy_fence();
    __syncwarp();
    if (lane == 0) add_release(counters.packed(index), 1);
    __syncwarp();
  }
}
