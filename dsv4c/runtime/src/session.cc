#include "session.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "error.h"

namespace dsv4c {
namespace {

using namespace format;

template <typename T>
void gather(std::vector<T>& into, const T* from, const std::vector<size_t>& indices, size_t width = 1) {
  into.resize(indices.size() * width);
  for (size_t i = 0; i < indices.size(); ++i)
    std::copy_n(from + indices[i] * width, width, into.begin() + static_cast<ptrdiff_t>(i * width));
}

}  // namespace

Session::Session(std::shared_ptr<const Engine> engine, uint32_t slots, uint32_t context,
                 const ExecutorOptions& options)
    : engine_(std::move(engine)),
      executor_(engine_->backend().executor(options)),
      state_(*engine_, *executor_, slots, context, options.poison),
      next_(slots),
      row_counts_(slots) {}

void Session::check_slot(uint32_t slot) const {
  if (slot >= state_.slot_count())
    fail(DSV4C_INVALID_ARGUMENT, "slot %u does not exist; the session has %u", slot, state_.slot_count());
}

void Session::validate(const dsv4c_step& step) {
  if (step.row_count == 0) fail(DSV4C_INVALID_ARGUMENT, "a step needs at least one row");
  if (step.row_count > INT32_MAX) fail(DSV4C_INVALID_ARGUMENT, "a step of %u rows is too long", step.row_count);
  if (!step.token_ids || !step.slots || !step.positions)
    fail(DSV4C_INVALID_ARGUMENT, "token_ids, slots and positions must not be null");
  if (step.flags & ~static_cast<uint32_t>(DSV4C_STEP_TIMES_ONLY))
    fail(DSV4C_INVALID_ARGUMENT, "step flags %u are unknown", step.flags);
  const uint32_t vocab_size = engine_->plan().header.vocab_size;
  for (uint32_t slot = 0; slot < state_.slot_count(); ++slot) next_[slot] = state_.length(slot);
  std::fill(row_counts_.begin(), row_counts_.end(), 0);
  for (uint32_t row = 0; row < step.row_count; ++row) {
    const int32_t slot = step.slots[row];
    const int32_t position = step.positions[row];
    if (slot < 0 || static_cast<uint32_t>(slot) >= state_.slot_count())
      fail(DSV4C_INVALID_ARGUMENT, "row %u: slot %d does not exist; the session has %u", row, slot,
           state_.slot_count());
    if (step.token_ids[row] < 0 || static_cast<uint32_t>(step.token_ids[row]) >= vocab_size)
      fail(DSV4C_INVALID_ARGUMENT, "row %u: token %d is outside the vocabulary of %u", row, step.token_ids[row],
           vocab_size);
    if (position < 0 || static_cast<uint32_t>(position) != next_[slot])
      fail(DSV4C_INVALID_ARGUMENT, "row %u: slot %d continues at position %u, not %d", row, slot, next_[slot],
           position);
    if (next_[slot] >= state_.context())
      fail(DSV4C_INVALID_ARGUMENT, "row %u: position %d of slot %d is beyond the session's context of %u", row,
           position, slot, state_.context());
    ++next_[slot];
    ++row_counts_[slot];
  }
  validate_logits_rows(step);
}

void Session::validate_logits_rows(const dsv4c_step& step) {
  wanted_.clear();
  if (step.logits_count == DSV4C_ALL_ROWS) {
    if (step.logits_rows)
      fail(DSV4C_INVALID_ARGUMENT, "logits_rows must be null when the logits of every row are asked for");
    for (uint32_t row = 0; row < step.row_count; ++row) wanted_.push_back(static_cast<int32_t>(row));
    return;
  }
  if (step.logits_count > 0 && !step.logits_rows) fail(DSV4C_INVALID_ARGUMENT, "logits_rows must not be null");
  std::vector<bool> seen(step.row_count);
  for (uint32_t i = 0; i < step.logits_count; ++i) {
    const int32_t row = step.logits_rows[i];
    if (row < 0 || static_cast<uint32_t>(row) >= step.row_count)
      fail(DSV4C_INVALID_ARGUMENT, "logits row %d is not one of the step's %u rows", row, step.row_count);
    if (seen[row]) fail(DSV4C_INVALID_ARGUMENT, "logits row %d is asked for twice", row);
    seen[row] = true;
    wanted_.push_back(row);
  }
}

void Session::validate_sampling(const dsv4c_sampling& sampling) const {
  if (wanted_.empty()) return;
  if (!sampling.temperature || !sampling.top_k || !sampling.top_p || !sampling.seed)
    fail(DSV4C_INVALID_ARGUMENT, "temperature, top_k, top_p and seed must not be null");
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (!(sampling.temperature[i] >= 0) || !std::isfinite(sampling.temperature[i]))
      fail(DSV4C_INVALID_ARGUMENT, "temperature %g of logits row %zu is not a number from 0", sampling.temperature[i],
           i);
    if (sampling.top_k[i] < 0)
      fail(DSV4C_INVALID_ARGUMENT, "top_k %d of logits row %zu is negative", sampling.top_k[i], i);
    if (!(sampling.top_p[i] >= 0 && sampling.top_p[i] <= 1))
      fail(DSV4C_INVALID_ARGUMENT, "top_p %g of logits row %zu is not between 0 and 1", sampling.top_p[i], i);
  }
}

// The smallest bucket that holds `rows`, or the largest mixed one.
const Bucket& Session::choose_bucket(uint32_t rows, bool decode) const {
  const Plan& plan = engine_->plan();
  const Bucket* fitting[2] = {};  // decode, mixed
  const Bucket* largest = nullptr;
  for (uint32_t index : plan.main_buckets) {
    const Bucket& bucket = plan.buckets[index];
    const bool mixed = static_cast<BucketKind>(bucket.kind) == BucketKind::MIXED;
    if (mixed && (!largest || bucket.tokens > largest->tokens)) largest = &bucket;
    const Bucket*& best = fitting[mixed];
    if (bucket.tokens >= rows && (!best || bucket.tokens < best->tokens)) best = &bucket;
  }
  if (decode && fitting[0]) return *fitting[0];
  return fitting[1] ? *fitting[1] : *largest;
}

void Session::step(const dsv4c_step& step, float* logits, uint64_t logits_size) {
  validate(step);
  const uint64_t needed = uint64_t{wanted_.size()} * engine_->plan().header.vocab_size;
  if (needed > 0 && (!logits || logits_size < needed))
    fail(DSV4C_INVALID_ARGUMENT, "logits need room for %" PRIu64 " floats, there is room for %" PRIu64, needed,
         logits ? logits_size : 0);
  Request request;
  request.logits = logits;
  run(step, request);
}

void Session::sample(const dsv4c_step& step, const dsv4c_sampling& sampling, int32_t* ids) {
  validate(step);
  validate_sampling(sampling);
  if (!wanted_.empty() && !ids) fail(DSV4C_INVALID_ARGUMENT, "ids must not be null");
  Request request;
  request.sampling = &sampling;
  request.ids = ids;
  run(step, request);
}

void Session::trace(const dsv4c_step& step, dsv4c_trace_fn callback, void* user) {
  validate(step);
  if (!callback) fail(DSV4C_INVALID_ARGUMENT, "callback must not be null");
  Request request;
  request.callback = callback;
  request.user = user;
  request.trace_outputs = !(step.flags & DSV4C_STEP_TIMES_ONLY);
  run(step, request);
}

void Session::run(const dsv4c_step& step, const Request& request) {
  const bool decode = std::all_of(row_counts_.begin(), row_counts_.end(), [](uint32_t rows) { return rows <= 1; });
  executor_->reserve_logits(std::min<uint64_t>(wanted_.size(), largest_bucket(engine_->plan())));
  try {
    for (uint32_t begin = 0; begin < step.row_count;) {
      const Bucket& bucket = choose_bucket(step.row_count - begin, decode && begin == 0);
      const uint32_t end = begin + std::min(bucket.tokens, step.row_count - begin);
      run_piece(step, request, bucket, begin, end);
      begin = end;
    }
  } catch (const std::exception& error) {
    const StatusError* known = dynamic_cast<const StatusError*>(&error);
    std::string lost;
    for (uint32_t slot = 0; slot < state_.slot_count(); ++slot) {
      if (row_counts_[slot] == 0 || state_.abandon(slot, next_[slot])) continue;
      lost += (lost.empty() ? "" : ", ") + std::to_string(slot);
    }
    if (lost.empty()) throw;
    fail(known ? known->status() : DSV4C_INTERNAL,
         "%s; the step had overwritten older rows, so these slots were reset: %s", error.what(), lost.c_str());
  }
  for (uint32_t slot = 0; slot < state_.slot_count(); ++slot)
    if (row_counts_[slot] > 0) state_.advance(slot, next_[slot]);
}

void Session::gather_sampling(const dsv4c_sampling& sampling, StepMemory& memory) {
  auto set = [&](Input input, const void* data) { memory.inputs[static_cast<int>(input)] = data; };
  gather(temperature_, sampling.temperature, requests_);
  gather(top_k_, sampling.top_k, requests_);
  gather(top_p_, sampling.top_p, requests_);
  gather(seed_, sampling.seed, requests_);
  set(Input::TEMPERATURE, temperature_.data());
  set(Input::TOP_K, top_k_.data());
  set(Input::TOP_P, top_p_.data());
  set(Input::SEED, seed_.data());
  if (!sampling.mask) return;
  gather(mask_, sampling.mask, requests_, static_cast<size_t>(engine_->plan().mask_words()));
  set(Input::MASK, mask_.data());
}

void Session::run_piece(const dsv4c_step& step, const Request& request, const Bucket& bucket, uint32_t begin,
                        uint32_t end) {
  const size_t vocab_size = engine_->plan().header.vocab_size;
  requests_.clear();
  piece_rows_.clear();
  for (size_t i = 0; i < wanted_.size(); ++i) {
    const uint32_t row = static_cast<uint32_t>(wanted_[i]);
    if (row < begin || row >= end) continue;
    requests_.push_back(i);
    piece_rows_.push_back(static_cast<int32_t>(row - begin));
  }
  const size_t rows = requests_.size();

  StepMemory memory;
  auto dim = [&](Dim dim) -> int64_t& { return memory.dims[static_cast<int>(dim)]; };
  auto input = [&](Input input) -> const void*& { return memory.inputs[static_cast<int>(input)]; };
  dim(Dim::TOKENS) = end - begin;
  dim(Dim::LOGITS) = static_cast<int64_t>(rows);
  dim(Dim::SLOTS) = state_.slot_count();
  dim(Dim::BLOCKS) = state_.block_count();
  dim(Dim::TABLE) = state_.blocks_per_slot();
  memory.states = state_.planes();
  input(Input::TOKEN_IDS) = step.token_ids + begin;
  input(Input::SLOTS) = step.slots + begin;
  input(Input::POSITIONS) = step.positions + begin;
  input(Input::BLOCK_TABLE) = state_.block_table();
  memory.block_table_version = state_.block_table_version();
  input(Input::LOGITS_ROWS) = piece_rows_.data();
  if (request.sampling && rows > 0) gather_sampling(*request.sampling, memory);

  // Straight to the caller where the piece's rows follow one another there.
  const bool direct = request.logits && rows > 0 && requests_.back() - requests_.front() + 1 == rows &&
                      std::is_sorted(requests_.begin(), requests_.end());
  float* logits = nullptr;
  if (direct) {
    logits = request.logits + requests_.front() * vocab_size;
  } else if (request.logits) {
    logits_.resize(rows * vocab_size);
    logits = logits_.data();
  }
  ids_.resize(rows);
  memory.outputs[static_cast<int>(Output::LOGITS)] = logits;
  memory.outputs[static_cast<int>(Output::SAMPLED)] = request.ids ? ids_.data() : nullptr;

  Trace trace;
  if (request.callback) trace = observer(request, begin, end - begin);
  executor_->run(bucket, memory, request.sampling != nullptr, request.callback ? &trace : nullptr);

  for (size_t i = 0; i < rows; ++i) {
    if (request.logits && !direct)
      std::copy_n(logits + i * vocab_size, vocab_size, request.logits + requests_[i] * vocab_size);
    if (request.ids) request.ids[requests_[i]] = ids_[i];
  }
}

Trace Session::observer(const Request& request, uint32_t first_row, uint32_t row_count) const {
  Trace trace;
  trace.outputs = request.trace_outputs;
  trace.observer = [this, request, first_row, row_count](const LaunchReport& report) {
    const Plan& plan = engine_->plan();
    std::vector<dsv4c_trace_tensor> outputs(report.output_count);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const TensorView& view = report.outputs[i].tensor;
      outputs[i].data = view.data;
      outputs[i].dtype = static_cast<uint32_t>(view.dtype);
      outputs[i].ndim = view.ndim;
      std::copy_n(view.size, 4, outputs[i].size);
      std::copy_n(view.stride, 4, outputs[i].stride);
    }
    dsv4c_trace_event event = {};
    event.struct_size = sizeof event;
    event.launch = report.index;
    event.kernel = plan.text(plan.kernels[report.launch.kernel].name);
    event.node = plan.text(report.launch.name);
    event.layer = report.launch.layer;
    event.first_row = first_row;
    event.row_count = row_count;
    event.output_count = report.output_count;
    event.outputs = outputs.data();
    event.bytes_moved = report.bytes_moved;
    event.flops = report.flops;
    event.seconds = report.seconds;
    return request.callback(request.user, &event) == 0;
  };
  return trace;
}

}  // namespace dsv4c
