#include "cuda/cuda_backend.h"

#include <chrono>

#include "cuda/cuda_executor.h"
#include "cuda/weight_loader.h"

namespace dsv4c::cuda {

CudaBackend::CudaBackend(const EngineFile& file, const std::string& name, unsigned device, unsigned threads)
    : file_(file), name_(name), threads_(threads), device_(device, file.arch()) {}

CudaBackend::~CudaBackend() {
  if (!device_.context()) return;
  // Given back in the context, which ends after it.
  const Driver& driver = device_.driver();
  driver.context_push(device_.context());
  images_.reset();
  weights_ = DeviceMemory();
  ContextHandle popped;
  driver.context_pop(&popped);
}

Machine CudaBackend::machine() const {
  Machine machine;
  machine.kernel_bytes = file_.section(format::kKernels).size;
  machine.name = device_.name();
  machine.sm_count = device_.sm_count();
  return machine;
}

void CudaBackend::load(const Plan& plan) {
  plan_ = &plan;
  device_.open_context();
  const CurrentContext current(device_);
  images_ = std::make_unique<KernelImages>(device_, plan, file_.section(format::kKernels));
  weights_ = DeviceMemory(device_, plan.header.weight_bytes, ("the weights of engine " + name_).c_str());
  const auto start = std::chrono::steady_clock::now();
  load_weights(device_, {file_.weights_descriptor(), file_.weights_offset()}, weights_, threads_);
  weight_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::unique_ptr<Executor> CudaBackend::executor(const ExecutorOptions& options) const {
  return std::make_unique<CudaExecutor>(*this, options);
}

}  // namespace dsv4c::cuda
