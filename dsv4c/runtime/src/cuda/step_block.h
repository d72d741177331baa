#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend.h"
#include "cuda/device.h"

namespace dsv4c::cuda {

// What every kernel knows of the step: dsv4c/kernels/cuda/step.cuh, with addresses on the device.
struct StepHeader {
  int32_t tokens;
  int32_t logits_rows;
  int32_t slots;
  int32_t blocks;
  int32_t table_width;
  int32_t has_mask;
  uint32_t arrivals;
  int32_t reserved;
  DeviceAddress run_first;
  DeviceAddress run_begin;
  DeviceAddress run_length;
  DeviceAddress run_rows;
};
static_assert(sizeof(StepHeader) == 64);
static_assert(offsetof(StepHeader, tokens) == 0 && offsetof(StepHeader, logits_rows) == 4);
static_assert(offsetof(StepHeader, slots) == 8 && offsetof(StepHeader, blocks) == 12);
static_assert(offsetof(StepHeader, table_width) == 16 && offsetof(StepHeader, has_mask) == 20);
static_assert(offsetof(StepHeader, arrivals) == 24);
static_assert(offsetof(StepHeader, run_first) == 32 && offsetof(StepHeader, run_begin) == 40);
static_assert(offsetof(StepHeader, run_length) == 48 && offsetof(StepHeader, run_rows) == 56);

// The inputs of a step on the device: one block that a single copy fills, laid out for the capacity of the bucket, so
// that the addresses are those of the last step in it; the mask and the block table apart.
class StepBlock {
 public:
  StepBlock(const Device& device, const Plan& plan);

  // Queues the copies of a step; the block's own memory is free again when the stream has run them.
  void upload(const format::Bucket& bucket, const StepMemory& memory, bool sampling, StreamHandle stream);

  DeviceAddress header() const { return device_block_.address(); }
  // Null for a mask when there has been none.
  DeviceAddress input(format::Input input, const format::Bucket& bucket) const;
  // Changes when an address that `input` gave before does not hold any more.
  uint64_t version() const { return version_; }

 private:
  void write_header(const format::Bucket& bucket, const StepMemory& memory, bool has_mask);
  void write_runs(const format::Bucket& bucket, const StepMemory& memory);
  void upload_mask(const StepMemory& memory, uint64_t rows, StreamHandle stream);
  void upload_table(const StepMemory& memory, StreamHandle stream);

  const Device& device_;
  const Plan& plan_;
  PinnedMemory host_block_;
  DeviceMemory device_block_;
  PinnedMemory host_mask_;
  DeviceMemory device_mask_;
  DeviceMemory table_;
  uint64_t table_version_ = 0;
  uint64_t version_ = 0;

  // Of the runs: by slot, the number of its rows and where the next one goes.
  struct SlotRows {
    int32_t count = 0;
    int32_t begin = 0;
    int32_t next = 0;
    int32_t first_position = 0;
  };
  std::vector<SlotRows> by_slot_;
  std::vector<int32_t> used_slots_;
};

}  // namespace dsv4c::cuda
