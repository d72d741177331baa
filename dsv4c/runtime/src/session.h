#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "dsv4c/dsv4c.h"
#include "engine.h"
#include "session_state.h"

namespace dsv4c {

// Runs steps over the slots of a SessionState. One thread at a time: the C functions hold `in_use` during a call.
class Session {
 public:
  Session(std::shared_ptr<const Engine> engine, uint32_t slots, uint32_t context, const ExecutorOptions& options);

  const Plan& plan() const { return engine_->plan(); }
  SessionState& state() { return state_; }
  std::atomic<bool>& in_use() { return in_use_; }

  void step(const dsv4c_step& step, float* logits, uint64_t logits_size);
  void sample(const dsv4c_step& step, const dsv4c_sampling& sampling, int32_t* ids);
  void trace(const dsv4c_step& step, dsv4c_trace_fn callback, void* user);
  // Throws for an unknown slot.
  void check_slot(uint32_t slot) const;

 private:
  // What a step is asked for, one entry per logits row.
  struct Request {
    float* logits = nullptr;  // null: not wanted
    const dsv4c_sampling* sampling = nullptr;
    int32_t* ids = nullptr;
    dsv4c_trace_fn callback = nullptr;
    void* user = nullptr;
    bool trace_outputs = true;
  };

  // Throws without having changed anything. Sets next_, row_counts_ and wanted_.
  void validate(const dsv4c_step& step);
  void validate_logits_rows(const dsv4c_step& step);
  void validate_sampling(const dsv4c_sampling& sampling) const;
  const format::Bucket& choose_bucket(uint32_t rows, bool decode) const;
  void run(const dsv4c_step& step, const Request& request);
  void run_piece(const dsv4c_step& step, const Request& request, const format::Bucket& bucket, uint32_t begin,
                 uint32_t end);
  void gather_sampling(const dsv4c_sampling& sampling, StepMemory& memory);
  Trace observer(const Request& request, uint32_t first_row, uint32_t row_count) const;

  std::shared_ptr<const Engine> engine_;
  std::unique_ptr<Executor> executor_;
  SessionState state_;
  std::atomic<bool> in_use_{false};

  // Of the step being run.
  std::vector<uint32_t> next_;        // by slot: its length after the step
  std::vector<uint32_t> row_counts_;  // by slot
  std::vector<int32_t> wanted_;       // rows that want logits, in the caller's order
  // Of the piece being run: which entries of wanted_ it serves, and their inputs and outputs.
  std::vector<size_t> requests_;
  std::vector<int32_t> piece_rows_;
  std::vector<float> temperature_;
  std::vector<int32_t> top_k_;
  std::vector<float> top_p_;
  std::vector<int64_t> seed_;
  std::vector<int32_t> mask_;
  std::vector<float> logits_;
  std::vector<int32_t> ids_;
};

}  // namespace dsv4c
