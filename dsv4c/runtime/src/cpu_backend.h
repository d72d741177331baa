#pragma once

#include <vector>

#include "backend.h"
#include "thread_pool.h"

namespace dsv4c {

// Calls the C++ kernels one after the other; each spreads its own work over the pool.
class CpuBackend : public Backend {
 public:
  explicit CpuBackend(ThreadPool& pool) : pool_(pool) {}
  bool has_kernel(std::string_view name) const override;
  void load(const Plan& plan) override;
  void run(const format::Bucket& bucket, const StepMemory& memory, bool sampling,
           const LaunchObserver* observer) const override;

 private:
  ArgValue resolve(const format::Arg& arg, const StepMemory& memory) const;
  TensorView view(const format::Tensor& tensor, const StepMemory& memory) const;
  void call(const format::Launch& launch, const KernelArgs& args) const;

  ThreadPool& pool_;
  const Plan* plan_ = nullptr;
  std::vector<KernelFn> kernels_;  // by kernel index of the plan
};

}  // namespace dsv4c
