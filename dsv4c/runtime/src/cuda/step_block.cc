#include "cuda/step_block.h"

#include <algorithm>
#include <cstring>

namespace dsv4c::cuda {
namespace {

using namespace format;

constexpr uint64_t kAlign = 256;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The arrays of the block behind the header, in this order. Those of sampling come last: other steps end before them.
enum Array : int {
  kTokenIds,
  kSlots,
  kPositions,
  kRunFirst,
  kRunBegin,
  kRunLength,
  kRunRows,
  kLogitsRows,
  kTemperature,
  kTopK,
  kTopP,
  kSeed,
  kArrayCount,
};
constexpr int kFirstOfSampling = kTemperature;

// Where an array of a bucket begins, or (kArrayCount) the block ends. All have a capacity of `tokens` rows.
uint64_t offset_of(int array, uint32_t tokens) {
  const uint64_t words = aligned(uint64_t{tokens} * sizeof(int32_t));
  const uint64_t before_seed = aligned(sizeof(StepHeader)) + static_cast<uint64_t>(std::min<int>(array, kSeed)) * words;
  return array <= kSeed ? before_seed : before_seed + aligned(uint64_t{tokens} * sizeof(int64_t));
}

int array_of(Input input) {
  switch (input) {
    case Input::TOKEN_IDS:
      return kTokenIds;
    case Input::SLOTS:
      return kSlots;
    case Input::POSITIONS:
      return kPositions;
    case Input::LOGITS_ROWS:
      return kLogitsRows;
    case Input::TEMPERATURE:
      return kTemperature;
    case Input::TOP_K:
      return kTopK;
    case Input::TOP_P:
      return kTopP;
    case Input::SEED:
      return kSeed;
    case Input::BLOCK_TABLE:
    case Input::MASK:
      break;
  }
  return kArrayCount;
}

int64_t dim(const StepMemory& memory, Dim which) { return memory.dims[static_cast<int>(which)]; }

const void* given(const StepMemory& memory, Input which) { return memory.inputs[static_cast<int>(which)]; }

}  // namespace

StepBlock::StepBlock(const Device& device, const Plan& plan)
    : device_(device),
      plan_(plan),
      host_block_(device, offset_of(kArrayCount, largest_bucket(plan)), "the inputs of a step"),
      device_block_(device, host_block_.size(), "the inputs of a step") {}

DeviceAddress StepBlock::input(Input input, const Bucket& bucket) const {
  if (input == Input::MASK) return device_mask_.address();
  if (input == Input::BLOCK_TABLE) return table_.address();
  return device_block_.address() + offset_of(array_of(input), bucket.tokens);
}

void StepBlock::upload(const Bucket& bucket, const StepMemory& memory, bool sampling, StreamHandle stream) {
  const auto rows = static_cast<uint64_t>(dim(memory, Dim::TOKENS));
  const auto logits_rows = static_cast<uint64_t>(dim(memory, Dim::LOGITS));
  const bool has_mask = sampling && given(memory, Input::MASK);
  std::byte* block = host_block_.data();
  auto copy = [&](Input which, uint64_t bytes) {
    if (bytes > 0) std::memcpy(block + offset_of(array_of(which), bucket.tokens), given(memory, which), bytes);
  };
  write_header(bucket, memory, has_mask);
  copy(Input::TOKEN_IDS, rows * sizeof(int32_t));
  copy(Input::SLOTS, rows * sizeof(int32_t));
  copy(Input::POSITIONS, rows * sizeof(int32_t));
  write_runs(bucket, memory);
  copy(Input::LOGITS_ROWS, logits_rows * sizeof(int32_t));
  if (sampling) {
    copy(Input::TEMPERATURE, logits_rows * sizeof(float));
    copy(Input::TOP_K, logits_rows * sizeof(int32_t));
    copy(Input::TOP_P, logits_rows * sizeof(float));
    copy(Input::SEED, logits_rows * sizeof(int64_t));
  }
  const uint64_t bytes = offset_of(sampling ? kArrayCount : kFirstOfSampling, bucket.tokens);
  const Driver& driver = device_.driver();
  driver.check(driver.copy_to_device(device_block_.address(), block, bytes, stream), "copying the step's inputs");
  if (has_mask) upload_mask(memory, logits_rows, stream);
  upload_table(memory, stream);
}

void StepBlock::write_header(const Bucket& bucket, const StepMemory& memory, bool has_mask) {
  auto address = [&](int array) { return device_block_.address() + offset_of(array, bucket.tokens); };
  StepHeader header = {};
  header.tokens = static_cast<int32_t>(dim(memory, Dim::TOKENS));
  header.logits_rows = static_cast<int32_t>(dim(memory, Dim::LOGITS));
  header.slots = static_cast<int32_t>(dim(memory, Dim::SLOTS));
  header.blocks = static_cast<int32_t>(dim(memory, Dim::BLOCKS));
  header.table_width = static_cast<int32_t>(dim(memory, Dim::TABLE));
  header.has_mask = has_mask;
  header.run_first = address(kRunFirst);
  header.run_begin = address(kRunBegin);
  header.run_length = address(kRunLength);
  header.run_rows = address(kRunRows);
  std::memcpy(host_block_.data(), &header, sizeof header);
}

void StepBlock::write_runs(const Bucket& bucket, const StepMemory& memory) {
  const auto rows = static_cast<int32_t>(dim(memory, Dim::TOKENS));
  const auto* slots = static_cast<const int32_t*>(given(memory, Input::SLOTS));
  const auto* positions = static_cast<const int32_t*>(given(memory, Input::POSITIONS));
  auto array = [&](int which) {
    return reinterpret_cast<int32_t*>(host_block_.data() + offset_of(which, bucket.tokens));
  };
  int32_t *first = array(kRunFirst), *begin = array(kRunBegin), *length = array(kRunLength), *order = array(kRunRows);
  by_slot_.resize(static_cast<size_t>(dim(memory, Dim::SLOTS)));
  used_slots_.clear();
  for (int32_t row = 0; row < rows; ++row) {
    SlotRows& slot = by_slot_[slots[row]];
    if (slot.count++ > 0) continue;
    slot.first_position = positions[row];
    used_slots_.push_back(slots[row]);
  }
  int32_t next = 0;
  for (int32_t used : used_slots_) {
    SlotRows& slot = by_slot_[used];
    slot.begin = slot.next = next;
    next += slot.count;
  }
  for (int32_t row = 0; row < rows; ++row) {
    SlotRows& slot = by_slot_[slots[row]];
    first[row] = slot.first_position;
    begin[row] = slot.begin;
    length[row] = slot.count;
    order[slot.next++] = row;
  }
  for (int32_t used : used_slots_) by_slot_[used] = {};
}

void StepBlock::upload_mask(const StepMemory& memory, uint64_t rows, StreamHandle stream) {
  const uint64_t row_bytes = static_cast<uint64_t>(plan_.mask_words()) * sizeof(int32_t);
  if (rows * row_bytes > device_mask_.size()) {
    uint64_t room = 1;
    while (room < rows) room *= 2;
    device_mask_ = DeviceMemory();
    ++version_;
    device_mask_ = DeviceMemory(device_, room * row_bytes, "the sampling masks");
    host_mask_ = PinnedMemory(device_, room * row_bytes, "the sampling masks");
  }
  std::memcpy(host_mask_.data(), given(memory, Input::MASK), rows * row_bytes);
  const Driver& driver = device_.driver();
  driver.check(driver.copy_to_device(device_mask_.address(), host_mask_.data(), rows * row_bytes, stream),
               "copying the sampling masks");
}

void StepBlock::upload_table(const StepMemory& memory, StreamHandle stream) {
  if (table_version_ == memory.block_table_version) return;
  const uint64_t bytes = static_cast<uint64_t>(dim(memory, Dim::BLOCKS)) * sizeof(int32_t);
  if (bytes != table_.size()) {
    table_ = DeviceMemory();
    ++version_;
    table_ = DeviceMemory(device_, bytes, "the block table");
  }
  const Driver& driver = device_.driver();
  driver.check(driver.copy_to_device(table_.address(), given(memory, Input::BLOCK_TABLE), bytes, stream),
               "copying the block table");
  table_version_ = memory.block_table_version;
}

}  // namespace dsv4c::cuda
