#pragma once

#include <memory>
#include <string>

#include "backend.h"
#include "cuda/device.h"
#include "cuda/kernel_images.h"
#include "engine_file.h"

namespace dsv4c::cuda {

// Launches the machine code of an engine on one NVIDIA GPU, which holds its weights.
class CudaBackend : public Backend {
 public:
  // Checks that the GPU fits the engine, and touches no memory there. `name` is the engine's, for errors.
  CudaBackend(const EngineFile& file, const std::string& name, unsigned device, unsigned threads);
  ~CudaBackend() override;

  Machine machine() const override;
  void load(const Plan& plan) override;
  double weight_seconds() const override { return weight_seconds_; }
  std::unique_ptr<Executor> executor(const ExecutorOptions& options) const override;

  const Device& device() const { return device_; }
  const Plan& plan() const { return *plan_; }
  const KernelImages& images() const { return *images_; }
  DeviceAddress weights() const { return weights_.address(); }

 private:
  const EngineFile& file_;
  std::string name_;
  unsigned threads_;
  Device device_;
  const Plan* plan_ = nullptr;
  std::unique_ptr<KernelImages> images_;
  DeviceMemory weights_;
  double weight_seconds_ = 0;
};

}  // namespace dsv4c::cuda
