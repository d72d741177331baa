#include "cuda/kernel_images.h"

#include <cinttypes>
#include <cstring>
#include <string>

#include "error.h"

namespace dsv4c::cuda {
namespace {

using namespace format;

// More dynamic shared memory than this must be asked for.
constexpr uint32_t kPlainSharedBytes = 48 << 10;
constexpr uint32_t kPortableCluster = 8;
// Behind the pointers of a launch: the step's header, then two scratch pointers of Triton, which are null.
constexpr uint32_t kMostExtraParameters = 3;

}  // namespace

KernelImages::KernelImages(const Device& device, const Plan& plan)
    : device_(device), plan_(plan), functions_(plan.kernels.size()), dynamic_bytes_(plan.kernels.size()) {}

// The delegation makes the destructor run when one of many images fails.
KernelImages::KernelImages(const Device& device, const Plan& plan, Bytes kernels) : KernelImages(device, plan) {
  std::vector<uint32_t> checked_count(plan.kernels.size());
  for (uint32_t index : plan.main_buckets) {
    const Bucket& bucket = plan.buckets[index];
    for (uint32_t i = 0; i < bucket.launch_count; ++i) {
      const Launch& launch = plan.launches[bucket.first_launch + i];
      if (!functions_[launch.kernel]) load(launch.kernel, kernels);
      uint32_t& checked = checked_count[launch.kernel];
      if (checked != launch.arg_count + 1) check_parameters(launch.kernel, launch.arg_count);
      checked = launch.arg_count + 1;
      set_attributes(launch.kernel, launch);
    }
  }
}

KernelImages::~KernelImages() {
  for (const Image& image : images_) device_.driver().module_unload(image.handle);
}

void KernelImages::load(uint32_t index, Bytes kernels) {
  const Driver& driver = device_.driver();
  const Kernel& kernel = plan_.kernels[index];
  const char* name = plan_.text(kernel.name);
  const char* entry = plan_.text(kernel.entry);
  const std::string where = std::string("loading kernel ") + name + " (" + entry + ")";
  FunctionHandle function = nullptr;
  driver.check(driver.module_get_function(&function, module(kernel, kernels), entry), where.c_str());
  // A driver that loads code when it is first launched would do so in the middle of a step.
  if (driver.function_load) driver.check(driver.function_load(function), where.c_str());
  functions_[index] = function;
}

ModuleHandle KernelImages::module(const Kernel& kernel, Bytes kernels) {
  for (const Image& image : images_)
    if (image.offset == kernel.image_offset && image.size == kernel.image_bytes) return image.handle;
  // The driver takes the size from the image itself; behind a damaged one follow zeros, not the next section.
  constexpr size_t kMargin = 64;
  std::vector<std::byte> copy(kernel.image_bytes + kMargin);
  std::memcpy(copy.data(), kernels.data + kernel.image_offset, kernel.image_bytes);
  ModuleHandle handle = nullptr;
  const std::string where = std::string("loading the image of kernel ") + plan_.text(kernel.name);
  device_.driver().check(device_.driver().module_load_data(&handle, copy.data()), where.c_str());
  images_.push_back({kernel.image_offset, kernel.image_bytes, handle});
  return handle;
}

// A kernel that declares more parameters than a launch has would read beyond them.
void KernelImages::check_parameters(uint32_t index, uint32_t pointers) const {
  const Driver& driver = device_.driver();
  if (!driver.function_get_param_info) return;
  uint32_t count = 0;
  size_t offset, size;
  const uint32_t most = pointers + kMostExtraParameters;
  while (count <= most && driver.function_get_param_info(functions_[index], count, &offset, &size) == kSuccess) {
    if (size != sizeof(DeviceAddress))
      fail(DSV4C_FORMAT, "parameter %u of kernel %s (%s) has %zu bytes and is no pointer", count,
           plan_.text(plan_.kernels[index].name), plan_.text(plan_.kernels[index].entry), size);
    ++count;
  }
  if (count < pointers + 1 || count > most)
    fail(DSV4C_FORMAT, "kernel %s (%s) takes %u parameters%s; its launches give it %u tensors and the step",
         plan_.text(plan_.kernels[index].name), plan_.text(plan_.kernels[index].entry), count,
         count > most ? " or more" : "", pointers);
}

void KernelImages::set_attributes(uint32_t index, const Launch& launch) {
  const Driver& driver = device_.driver();
  const FunctionHandle function = functions_[index];
  const Kernel& kernel = plan_.kernels[index];
  const std::string where = std::string("preparing kernel ") + plan_.text(kernel.name);
  int most_threads = 0, static_bytes = 0;
  driver.check(driver.function_get_attribute(&most_threads, kMaxThreadsPerBlock, function), where.c_str());
  driver.check(driver.function_get_attribute(&static_bytes, kSharedSizeBytes, function), where.c_str());
  const uint32_t threads = launch.block_x * launch.block_y * launch.block_z;
  if (threads > static_cast<uint32_t>(most_threads))
    fail(DSV4C_FORMAT, "launch %s has blocks of %u threads; kernel %s (%s) can have %d", plan_.text(launch.name),
         threads, plan_.text(kernel.name), plan_.text(kernel.entry), most_threads);
  const uint64_t shared = uint64_t{launch.shared_bytes} + static_cast<uint32_t>(static_bytes);
  if (shared > device_.shared_bytes_limit())
    fail(DSV4C_FORMAT, "launch %s needs %" PRIu64 " bytes of shared memory a block; %s has %u", plan_.text(launch.name),
         shared, device_.name().c_str(), device_.shared_bytes_limit());
  if (launch.shared_bytes > kPlainSharedBytes && launch.shared_bytes > dynamic_bytes_[index]) {
    driver.check(driver.function_set_attribute(function, kMaxDynamicSharedSizeBytes,
                                               static_cast<int>(launch.shared_bytes)),
                 where.c_str());
    dynamic_bytes_[index] = launch.shared_bytes;
  }
  if (launch.cluster > kPortableCluster)
    driver.check(driver.function_set_attribute(function, kNonPortableClusterSizeAllowed, 1), where.c_str());
}

}  // namespace dsv4c::cuda
