#pragma once

#include <memory>
#include <vector>

#include "backend.h"
#include "thread_pool.h"

namespace dsv4c {

// Calls the C++ kernels one after the other; each spreads its own work over the pool.
class CpuBackend : public Backend {
 public:
  // `weights` are those of the mapped file; their pages are read when touched.
  CpuBackend(ThreadPool& pool, const std::byte* weights) : pool_(pool), weights_(weights) {}
  Machine machine() const override;
  void load(const Plan& plan) override;
  std::unique_ptr<Executor> executor(const ExecutorOptions& options) const override;

  const Plan& plan() const { return *plan_; }
  // `arena` and `memory` hold host addresses; no output is null.
  void run(const format::Bucket& bucket, std::byte* arena, const StepMemory& memory, bool sampling,
           const Trace* trace) const;

 private:
  ArgValue resolve(const format::Arg& arg, std::byte* arena, const StepMemory& memory) const;
  TensorView view(const format::Tensor& tensor, std::byte* arena, const StepMemory& memory) const;
  void call(const format::Launch& launch, const KernelArgs& args) const;

  ThreadPool& pool_;
  const std::byte* weights_;
  const Plan* plan_ = nullptr;
  std::vector<KernelFn> kernels_;  // by kernel index of the plan
};

}  // namespace dsv4c
