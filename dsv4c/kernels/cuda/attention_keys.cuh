// The keys of one row of the step, in the order of the reference body: window positions from the ring, then those of
// this step, then compressed entries. For attention.cu and attention_plain.cu, by their macros:
//   WINDOW, RATIO        positions of the window; positions an entry stands for
//   HEAD_DIM, ROTARY     channels, and how many of them (the last) are rotary
//   RING_FORMAT          of a StateFormat; RING_ROWS rows a slot, RING_BYTES a row, RING_EXPONENT_BYTES beside it
//   HAS_ENTRIES, ENTRY_FORMAT, BLOCK_ROWS (rows a block), ENTRY_BYTES, ENTRY_EXPONENT_BYTES
//   SELECTED             columns of `selected`, 0 where a row sees every closed entry; SELECTED_STRIDE
//   KV_TYPE, KV_STRIDE   of this step's keys
#pragma once

#include "state_rows.cuh"
#include "step.cuh"

#define NO_SCORE bits_to_float(0xFF800000u)  // minus infinity

enum KeySource { NO_KEY, RING_KEY, STEP_KEY, ENTRY_KEY };

// Where a key lies.
struct KeyPlace {
  const u8* row;
  const u8* exponents;  // null where its plane has none
  int source;
};

// The state and inputs that hold the keys.
struct KeyPlanes {
  const KV_TYPE* kv;
  const u8* ring;
  const u8* ring_exponents;
  const u8* entries;
  const u8* entry_exponents;
  const int* selected;
  const int* slots;
  const int* positions;
  const int* block_table;
};

// The keys of a row. In shared memory, since few threads look up where a key lies.
struct RowKeys {
  const int* run;    // rows of the step at positions `first` and later
  const int* table;  // blocks of the slot
  int row;
  int position;
  int first;
  int slot;
  int start;      // position of the first key
  int in_window;  // keys before the entries
  int count;

  __device__ __forceinline__ void find(const KeyPlanes& planes, const StepHeader* step, int of_row) {
    row = of_row;
    position = planes.positions[row];
    first = step->run_first[row];
    run = step->run_rows + step->run_begin[row];
    slot = planes.slots[row];
    table = planes.block_table + (i64)slot * step->table_width;
    start = max(0, position - WINDOW + 1);
    in_window = position - start + 1;
    const int visible = HAS_ENTRIES ? (position + 1) / RATIO : 0;
    // Selected entries stand before the -1, and no row has more of them than it sees.
    count = in_window + (SELECTED ? min(SELECTED, visible) : visible);
  }

  __device__ __forceinline__ KeyPlace place(const KeyPlanes& planes, int key) const {
    if (key >= count) return {nullptr, nullptr, NO_KEY};
    if (key < in_window) {
      const int at = start + key;
      if (at >= first) return {(const u8*)(planes.kv + (i64)run[at - first] * KV_STRIDE), nullptr, STEP_KEY};
      const i64 stored = (i64)slot * RING_ROWS + at % RING_ROWS;
      return {planes.ring + stored * RING_BYTES, planes.ring_exponents + stored * RING_EXPONENT_BYTES, RING_KEY};
    }
#if HAS_ENTRIES
    int entry = key - in_window;
    if (SELECTED) entry = planes.selected[(i64)row * SELECTED_STRIDE + entry];
    if (entry < 0) return {nullptr, nullptr, NO_KEY};
    const i64 stored = (i64)table[entry / BLOCK_ROWS] * BLOCK_ROWS + entry % BLOCK_ROWS;
    return {planes.entries + stored * ENTRY_BYTES, planes.entry_exponents + stored * ENTRY_EXPONENT_BYTES, ENTRY_KEY};
#else
    return {nullptr, nullptr, NO_KEY};
#endif
  }
};

// Channel `c` of a key; 0 where there is none.
__device__ __forceinline__ float key_value(const u8* row, const u8* exponents, int source, int c) {
  if (source == STEP_KEY) return to_float(((const KV_TYPE*)row)[c]);
  if (source == RING_KEY) return state_value<RING_FORMAT, HEAD_DIM, ROTARY>(row, exponents, c);
#if HAS_ENTRIES
  if (source == ENTRY_KEY) return state_value<ENTRY_FORMAT, HEAD_DIM, ROTARY>(row, exponents, c);
#endif
  return 0.0f;
}
