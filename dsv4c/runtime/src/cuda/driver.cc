#include "cuda/driver.h"

#include <dlfcn.h>

#include <mutex>

#include "error.h"

namespace dsv4c::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

enum Presence { kRequired, kOptional };

class Symbols {
 public:
  Symbols(void* library, const char* arch) : library_(library), arch_(arch) {}

  template <typename Function>
  void find(Function& function, const char* name, Presence presence = kRequired) const {
    function = reinterpret_cast<Function>(::dlsym(library_, name));
    if (function || presence == kOptional) return;
    fail(DSV4C_UNSUPPORTED, "engine for %s needs a newer NVIDIA driver: %s has no %s", arch_, kLibrary, name);
  }

 private:
  void* library_;
  const char* arch_;
};

// A name ends in _v2 where the plain one still means an older call.
void find_functions(const Symbols& symbols, Driver& d) {
  symbols.find(d.get_error_name, "cuGetErrorName");
  symbols.find(d.get_error_string, "cuGetErrorString");
  symbols.find(d.init, "cuInit");
  symbols.find(d.get_version, "cuDriverGetVersion");
  symbols.find(d.device_get_count, "cuDeviceGetCount");
  symbols.find(d.device_get, "cuDeviceGet");
  symbols.find(d.device_get_name, "cuDeviceGetName");
  symbols.find(d.device_get_attribute, "cuDeviceGetAttribute");
  symbols.find(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
  symbols.find(d.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  symbols.find(d.context_push, "cuCtxPushCurrent_v2");
  symbols.find(d.context_pop, "cuCtxPopCurrent_v2");
  symbols.find(d.memory_info, "cuMemGetInfo_v2");
  symbols.find(d.memory_allocate, "cuMemAlloc_v2");
  symbols.find(d.memory_free, "cuMemFree_v2");
  symbols.find(d.host_allocate, "cuMemHostAlloc");
  symbols.find(d.host_free, "cuMemFreeHost");
  symbols.find(d.copy_to_device, "cuMemcpyHtoDAsync_v2");
  symbols.find(d.copy_to_host, "cuMemcpyDtoHAsync_v2");
  symbols.find(d.copy_on_device, "cuMemcpyDtoDAsync_v2");
  symbols.find(d.fill, "cuMemsetD8Async");
  symbols.find(d.stream_create, "cuStreamCreate");
  symbols.find(d.stream_destroy, "cuStreamDestroy_v2");
  symbols.find(d.stream_synchronize, "cuStreamSynchronize");
  symbols.find(d.stream_begin_capture, "cuStreamBeginCapture_v2");
  symbols.find(d.stream_end_capture, "cuStreamEndCapture");
  symbols.find(d.event_create, "cuEventCreate");
  symbols.find(d.event_destroy, "cuEventDestroy_v2");
  symbols.find(d.event_record, "cuEventRecord");
  symbols.find(d.event_record_with_flags, "cuEventRecordWithFlags");
  symbols.find(d.event_synchronize, "cuEventSynchronize");
  symbols.find(d.event_elapsed_time, "cuEventElapsedTime");
  symbols.find(d.module_load_data, "cuModuleLoadData");
  symbols.find(d.module_unload, "cuModuleUnload");
  symbols.find(d.module_get_function, "cuModuleGetFunction");
  symbols.find(d.function_get_attribute, "cuFuncGetAttribute");
  symbols.find(d.function_set_attribute, "cuFuncSetAttribute");
  symbols.find(d.function_load, "cuFuncLoad", kOptional);
  symbols.find(d.function_get_param_info, "cuFuncGetParamInfo", kOptional);
  symbols.find(d.launch_kernel, "cuLaunchKernel");
  symbols.find(d.launch_kernel_ex, "cuLaunchKernelEx");
  symbols.find(d.graph_instantiate, "cuGraphInstantiateWithFlags");
  symbols.find(d.graph_launch, "cuGraphLaunch");
  symbols.find(d.graph_exec_destroy, "cuGraphExecDestroy");
  symbols.find(d.graph_destroy, "cuGraphDestroy");
}

const char* describe(Result (*ask)(Result, const char**), Result result, const char* otherwise) {
  const char* text = nullptr;
  return ask(result, &text) == kSuccess && text ? text : otherwise;
}

}  // namespace

void Driver::check(Result result, const char* where) const {
  if (result == kSuccess) return;
  const char* name = describe(get_error_name, result, nullptr);
  if (!name) fail(DSV4C_DEVICE, "CUDA error %d, %s", result, where);
  fail(DSV4C_DEVICE, "%s: %s, %s", name, describe(get_error_string, result, "no description"), where);
}

const Driver& load_driver(const char* arch) {
  // Engines open in several threads; a machine without a driver may be given one while the process runs.
  static std::mutex mutex;
  static Driver driver;
  static bool loaded = false;
  const std::lock_guard lock(mutex);
  if (loaded) return driver;
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    fail(DSV4C_UNSUPPORTED, "engine for %s needs an NVIDIA driver: %s cannot be loaded (%s)", arch, kLibrary,
         ::dlerror());
  find_functions(Symbols(library, arch), driver);
  const Result result = driver.init(0);
  if (result != kSuccess)
    fail(DSV4C_UNSUPPORTED, "engine for %s needs an NVIDIA GPU: %s: %s, from cuInit", arch,
         describe(driver.get_error_name, result, "unknown error"),
         describe(driver.get_error_string, result, "no description"));
  driver.check(driver.get_version(&driver.version), "asking the driver for its version");
  loaded = true;
  return driver;
}

}  // namespace dsv4c::cuda
