#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/graph_cache.h"
#include "cuda/step_block.h"

namespace dsv4c::cuda {

// A session on the GPU: its memory, its stream, and the graphs of its steps.
class CudaExecutor : public Executor {
 public:
  CudaExecutor(const CudaBackend& backend, const ExecutorOptions& options);
  ~CudaExecutor() override;

  std::byte* allocate_state(uint64_t size, const char* what) override;
  void fill(std::byte* at, uint8_t value, uint64_t size) override;
  void copy(std::byte* to, const std::byte* from, uint64_t size) override;
  void read(void* to, const std::byte* from, uint64_t size) override;
  void write(std::byte* to, const void* from, uint64_t size) override;
  void finish() override;
  void reserve_logits(uint64_t rows) override;
  void run(const format::Bucket& bucket, const StepMemory& memory, bool sampling, const Trace* trace) override;

 private:
  // All that lives in the device's context, so that it ends inside of it.
  struct Resources {
    Resources(const Device& device, const Plan& plan);

    Stream stream;
    DeviceMemory arena;
    DeviceMemory state;
    StepBlock step;
    DeviceMemory logits;  // grows with the rows that are asked for
    DeviceMemory sampled;
    PinnedMemory staging;  // results on their way to the host, in two halves
    std::vector<Event> halves;
    std::vector<Event> marks;  // of traced steps
    GraphCache graphs;
  };
  // One step, as the functions below need it.
  struct Step {
    const format::Bucket& bucket;
    const StepMemory& memory;
    bool logits;
    bool sampling;
  };

  void start(const Step& step, const Trace* trace);
  DeviceAddress address(const format::Tensor& tensor, const Step& step) const;
  void launch(const format::Launch& launch, const Step& step) const;
  void launch_all(const Step& step) const;
  // Calls `visit(first, last)` for the launches of each operator that takes part: indices in the bucket.
  template <typename Visit>
  void for_each_operator(const Step& step, Visit&& visit) const;
  void run_traced(const Step& step, const Trace& trace);
  void run_timed(const Step& step, const Trace& trace);
  Event& mark(size_t index);
  double seconds_between(size_t first_mark, size_t second_mark, const char* where);
  bool report(const Step& step, const Trace& trace, uint32_t first, uint32_t last, double seconds);
  void copy_results(const Step& step);
  void copy_to_host(void* to, DeviceAddress from, uint64_t size, const char* where);
  std::string describe(const Step& step) const;

  const CudaBackend& backend_;
  const Device& device_;
  const Driver& driver_;
  const Plan& plan_;
  ExecutorOptions options_;
  uint64_t addresses_version_ = 0;
  std::unique_ptr<Resources> own_;
  // Outputs of the operator being traced, in the host's memory.
  std::vector<std::vector<std::byte>> traced_;
};

}  // namespace dsv4c::cuda
