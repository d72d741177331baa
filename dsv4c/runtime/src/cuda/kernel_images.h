#pragma once

#include <vector>

#include "cuda/device.h"
#include "plan_reader.h"

namespace dsv4c::cuda {

// The machine code of an engine, loaded: one module an image, one function a kernel of the plan.
class KernelImages {
 public:
  // Loads what the launches of plan.main_buckets use. `kernels` is the KERNELS section.
  KernelImages(const Device& device, const Plan& plan, Bytes kernels);
  ~KernelImages();
  KernelImages(const KernelImages&) = delete;
  KernelImages& operator=(const KernelImages&) = delete;

  FunctionHandle function(uint32_t kernel) const { return functions_[kernel]; }

 private:
  struct Image {
    uint64_t offset;
    uint64_t size;
    ModuleHandle handle;
  };

  KernelImages(const Device& device, const Plan& plan);
  void load(uint32_t kernel, Bytes kernels);
  ModuleHandle module(const format::Kernel& kernel, Bytes kernels);
  void check_parameters(uint32_t kernel, uint32_t pointers) const;
  void set_attributes(uint32_t kernel, const format::Launch& launch);

  const Device& device_;
  const Plan& plan_;
  std::vector<Image> images_;
  std::vector<FunctionHandle> functions_;  // by kernel index; null where no chosen bucket uses it
  std::vector<uint32_t> dynamic_bytes_;    // dynamic shared memory that each may use by now
};

}  // namespace dsv4c::cuda
