#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine.h"

namespace dsv4c {

// The state planes of a session and how far each slot has come. Counts of the routing belong to the session: what is
// done to a slot leaves them alone.
class SessionState {
 public:
  // The planes lie in the executor's memory.
  SessionState(const Engine& engine, Executor& executor, uint32_t slots, uint32_t context, bool poison);

  uint32_t slot_count() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t context() const { return context_; }
  int64_t blocks_per_slot() const { return blocks_per_slot_; }
  int64_t block_count() const { return static_cast<int64_t>(block_table_.size()); }
  const int32_t* block_table() const { return block_table_.data(); }  // [slots, blocks_per_slot]
  uint64_t block_table_version() const { return block_table_version_; }  // changes with the table's bytes
  std::byte* const* planes() const { return planes_.data(); }

  uint32_t length(uint32_t slot) const { return slots_[slot].length; }
  // A step wrote positions up to `length`.
  void advance(uint32_t slot, uint32_t length);
  // A step that may have written positions up to `length` failed. False if that cost the slot its older rows, and it
  // was reset.
  bool abandon(uint32_t slot, uint32_t length);
  void reset(uint32_t slot);
  void truncate(uint32_t slot, uint32_t position);
  void fork(uint32_t source, uint32_t destination);
  uint64_t save_size(uint32_t slot) const;
  void save(uint32_t slot, std::byte* data) const;
  void restore(uint32_t slot, const std::byte* data, uint64_t size);
  // [counted layers, experts]: since the session began, or `reset_routing_counts`.
  void read_routing_counts(uint64_t* counts) const;
  void reset_routing_counts();

 private:
  struct Slot {
    uint32_t length = 0;
    // Largest length since the last reset: rings have lost what is more than rollback_rows below it.
    uint32_t high_water = 0;
  };
  struct Piece {
    std::byte* data;
    uint64_t size;
  };

  void clear_counts();
  uint32_t lowest_position(const Slot& slot) const;
  uint64_t used_bytes(const format::State& state, uint32_t length) const;
  uint64_t saved_bytes(uint32_t length) const;
  // The memory of a slot of `length` positions, plane after plane. Blocks that follow one another are one piece.
  void for_each_piece(uint32_t slot, uint32_t length, const std::function<void(Piece)>& visit) const;

  const Engine& engine_;
  const Plan& plan_;
  Executor& executor_;
  uint32_t context_;
  bool poison_;
  int64_t blocks_per_slot_;
  std::vector<std::byte*> planes_;
  std::vector<int32_t> block_table_;
  uint64_t block_table_version_ = 1;
  std::vector<Slot> slots_;
};

}  // namespace dsv4c
