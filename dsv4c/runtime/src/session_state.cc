#include "session_state.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "error.h"

namespace dsv4c {
namespace {

using namespace format;

constexpr char kStateMagic[8] = {'D', 'S', 'V', '4', 'C', 'S', 'T', 'A'};
constexpr uint32_t kStateVersion = 1;
constexpr uint64_t kPlaneAlign = 256;

// Then the pieces of the slot's planes in the order of the plan.
struct StateHeader {
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint8_t engine_digest[32];
  uint32_t length;
  uint32_t high_water;
  uint64_t payload_bytes;
};
static_assert(sizeof(StateHeader) == 64);

bool is_block(const State& state) { return static_cast<StateKind>(state.kind) == StateKind::BLOCK; }

bool is_of_session(const State& state) { return static_cast<StateKind>(state.kind) == StateKind::ROUTING_COUNTS; }

}  // namespace

SessionState::SessionState(const Engine& engine, Executor& executor, uint32_t slots, uint32_t context, bool poison)
    : engine_(engine), plan_(engine.plan()), executor_(executor), context_(context), poison_(poison) {
  const PlanHeader& header = plan_.header;
  if (slots > INT32_MAX) fail(DSV4C_INVALID_ARGUMENT, "session of %u slots; at most %d are possible", slots, INT32_MAX);
  if (context == 0 || context > header.max_context)
    fail(DSV4C_INVALID_ARGUMENT, "context of %u positions; the engine allows 1 to %u", context, header.max_context);
  const uint64_t table_width = (uint64_t{context} + header.block_tokens - 1) / header.block_tokens;
  const uint64_t blocks = table_width * slots;
  if (blocks > INT32_MAX)
    fail(DSV4C_OUT_OF_MEMORY,
         "session of %u slots with %u positions needs %" PRIu64 " state blocks; at most %d are possible", slots,
         context, blocks, INT32_MAX);
  blocks_per_slot_ = static_cast<int64_t>(table_width);

  std::vector<uint64_t> offsets;
  uint64_t total = 0;
  for (const State& state : plan_.states) {
    uint64_t bytes;
    offsets.push_back(total);
    const uint64_t units = is_of_session(state) ? 1 : is_block(state) ? blocks : slots;
    if (__builtin_mul_overflow(unit_bytes(state), units, &bytes) ||
        __builtin_add_overflow(bytes, kPlaneAlign - 1, &bytes) ||
        __builtin_add_overflow(total, bytes / kPlaneAlign * kPlaneAlign, &total))
      fail(DSV4C_OUT_OF_MEMORY, "state plane %s of %u slots with %u positions exceeds the address space",
           plan_.text(state.name), slots, context);
  }
  char what[96];
  std::snprintf(what, sizeof what, "the state of %u slots with %u positions", slots, context);
  std::byte* memory = executor_.allocate_state(total, what);
  if (poison_ && total > 0) executor_.fill(memory, 0xFF, total);
  for (uint64_t offset : offsets) planes_.push_back(memory + offset);
  if (poison_) clear_counts();
  executor_.finish();
  block_table_.resize(blocks);
  for (uint64_t i = 0; i < blocks; ++i) block_table_[i] = static_cast<int32_t>(i);
  slots_.resize(slots);
}

uint32_t SessionState::lowest_position(const Slot& slot) const {
  return slot.high_water - std::min(slot.high_water, plan_.header.rollback_rows);
}

void SessionState::advance(uint32_t slot, uint32_t length) {
  slots_[slot].length = length;
  slots_[slot].high_water = std::max(slots_[slot].high_water, length);
}

bool SessionState::abandon(uint32_t slot, uint32_t length) {
  Slot& s = slots_[slot];
  s.high_water = std::max(s.high_water, length);
  if (s.length == 0 || s.length >= lowest_position(s)) return true;
  reset(slot);
  return false;
}

void SessionState::reset(uint32_t slot) {
  slots_[slot] = {};
  if (!poison_) return;
  for_each_piece(slot, context_, [this](Piece piece) { executor_.fill(piece.data, 0xFF, piece.size); });
  executor_.finish();
}

void SessionState::truncate(uint32_t slot, uint32_t position) {
  Slot& s = slots_[slot];
  if (position == 0) return reset(slot);
  if (position > s.length)
    fail(DSV4C_INVALID_ARGUMENT, "slot %u has %u positions; it cannot be truncated to %u", slot, s.length, position);
  if (position < lowest_position(s))
    fail(DSV4C_INVALID_ARGUMENT,
         "slot %u has reached position %u; it can be truncated to 0 or to %u and above, not to %u", slot, s.high_water,
         lowest_position(s), position);
  s.length = position;
}

uint64_t SessionState::used_bytes(const State& state, uint32_t length) const {
  if (is_of_session(state)) return 0;
  return is_block(state) ? length / state.ratio * state.row_bytes : unit_bytes(state);
}

uint64_t SessionState::saved_bytes(uint32_t length) const {
  uint64_t bytes = 0;
  for (const State& state : plan_.states) bytes += used_bytes(state, length);
  return bytes;
}

void SessionState::for_each_piece(uint32_t slot, uint32_t length, const std::function<void(Piece)>& visit) const {
  for (size_t i = 0; i < planes_.size(); ++i) {
    const State& state = plan_.states[i];
    const uint64_t unit = unit_bytes(state);
    if (is_of_session(state)) continue;
    if (!is_block(state)) {
      visit({planes_[i] + slot * unit, unit});
      continue;
    }
    uint64_t left = used_bytes(state, length);
    const int32_t* block = block_table_.data() + slot * blocks_per_slot_;
    while (left > 0) {
      const Piece first{planes_[i] + static_cast<uint64_t>(*block) * unit, std::min(left, unit)};
      uint64_t bytes = first.size;
      for (++block; bytes < left && block[0] == block[-1] + 1; ++block) bytes += std::min(left - bytes, unit);
      visit({first.data, bytes});
      left -= bytes;
    }
  }
}

void SessionState::fork(uint32_t source, uint32_t destination) {
  if (source == destination) return;
  const uint32_t length = slots_[source].length;
  std::vector<Piece> pieces;
  for_each_piece(source, length, [&](Piece piece) { pieces.push_back(piece); });
  size_t next = 0;
  // The blocks of the two slots may follow one another in different places.
  for_each_piece(destination, length, [&](Piece piece) {
    while (piece.size > 0) {
      Piece& from = pieces[next];
      const uint64_t bytes = std::min(piece.size, from.size);
      executor_.copy(piece.data, from.data, bytes);
      piece = {piece.data + bytes, piece.size - bytes};
      from = {from.data + bytes, from.size - bytes};
      if (from.size == 0) ++next;
    }
  });
  executor_.finish();
  slots_[destination] = slots_[source];
}

uint64_t SessionState::save_size(uint32_t slot) const {
  return sizeof(StateHeader) + saved_bytes(slots_[slot].length);
}

void SessionState::save(uint32_t slot, std::byte* data) const {
  const Slot& s = slots_[slot];
  StateHeader header = {};
  std::memcpy(header.magic, kStateMagic, sizeof kStateMagic);
  header.version = kStateVersion;
  std::memcpy(header.engine_digest, engine_.digest().data(), sizeof header.engine_digest);
  header.length = s.length;
  header.high_water = s.high_water;
  header.payload_bytes = saved_bytes(s.length);
  std::memcpy(data, &header, sizeof header);
  data += sizeof header;
  for_each_piece(slot, s.length, [&](Piece piece) {
    executor_.read(data, piece.data, piece.size);
    data += piece.size;
  });
  executor_.finish();
}

void SessionState::restore(uint32_t slot, const std::byte* data, uint64_t size) {
  StateHeader header;
  if (size < sizeof header || std::memcmp(data, kStateMagic, sizeof kStateMagic) != 0)
    fail(DSV4C_INVALID_ARGUMENT, "not a saved slot: the %" PRIu64 " bytes do not begin with %.8s", size, kStateMagic);
  std::memcpy(&header, data, sizeof header);
  if (header.version != kStateVersion)
    fail(DSV4C_INVALID_ARGUMENT, "saved slot has version %u; this runtime reads %u", header.version, kStateVersion);
  if (std::memcmp(header.engine_digest, engine_.digest().data(), sizeof header.engine_digest) != 0)
    fail(DSV4C_INVALID_ARGUMENT, "saved slot belongs to another engine");
  if (header.length > context_)
    fail(DSV4C_INVALID_ARGUMENT, "saved slot has %u positions, the session's context is %u", header.length, context_);
  const Slot restored{header.length, header.high_water};
  if (header.high_water < header.length || (header.length > 0 && header.length < lowest_position(restored)))
    fail(DSV4C_INVALID_ARGUMENT, "saved slot is damaged: length %u, highest position %u", header.length,
         header.high_water);
  const uint64_t payload = saved_bytes(header.length);
  if (header.payload_bytes != payload || size - sizeof header != payload)
    fail(DSV4C_INVALID_ARGUMENT, "saved slot of %u positions has %" PRIu64 " bytes, expected %" PRIu64, header.length,
         size, payload + sizeof header);
  data += sizeof header;
  for_each_piece(slot, header.length, [&](Piece piece) {
    executor_.write(piece.data, data, piece.size);
    data += piece.size;
  });
  executor_.finish();
  slots_[slot] = restored;
}

void SessionState::clear_counts() {
  for (uint32_t index : plan_.counted_states) executor_.fill(planes_[index], 0, unit_bytes(plan_.states[index]));
}

void SessionState::read_routing_counts(uint64_t* counts) const {
  const uint32_t experts = plan_.counted_experts();
  for (uint32_t index : plan_.counted_states) {
    executor_.read(counts, planes_[index], experts * sizeof(uint64_t));
    counts += experts;
  }
  executor_.finish();
}

void SessionState::reset_routing_counts() {
  clear_counts();
  executor_.finish();
}

}  // namespace dsv4c
