// A libcuda.so.1 for tests: the functions of the driver that the runtime calls, on the memory of the host.
//
// It is stricter than a driver where that finds mistakes. Addresses of the device fault when the host touches them;
// work in a stream waits until somebody synchronises; copies and kernels are checked to stay inside allocations; calls
// without a current context fail. An image is text that says which operator of the runtime an entry computes, with
// everything but the pointers: what a real image has compiled in (see tests/runtime/hand_cuda_engine.py).
//
// FAKE_CUDA_VERSION (12040), FAKE_CUDA_CAPABILITY (9.0), FAKE_CUDA_SMS (132), FAKE_CUDA_MEMORY (bytes) and
// FAKE_CUDA_DEVICES (1) say what the machine is; the fake_... functions at the end serve the tests.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/step_block.h"
#include "dsv4c/testing.h"

using dsv4c::cuda::DeviceAddress;
using dsv4c::cuda::LaunchConfig;
using dsv4c::cuda::StepHeader;
using Result = int;

enum : Result {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kTooLarge = 720,
  kCaptureUnsupported = 900,
};

struct Allocation {
  char* alias;  // the same pages, for the fake itself
  uint64_t size;
};

struct Argument {
  dsv4c_testing_arg value = {};
  bool is_mask = false;
  uint32_t dim[4] = {};
};

struct FunctionObject {
  std::string entry;
  std::string kernel;
  int extra_parameters = 0;  // behind the step, as Triton has them
  int static_bytes = 0;
  int dynamic_limit = 48 << 10;
  std::vector<Argument> arguments;

  size_t pointers() const {
    size_t count = 0;
    for (const Argument& argument : arguments) count += argument.value.kind == 1;
    return count;
  }
  size_t parameters() const { return pointers() + 1 + static_cast<size_t>(extra_parameters); }
};

struct ModuleObject {
  std::map<std::string, FunctionObject> functions;
};

using Work = std::function<Result()>;

struct GraphObject {
  std::vector<Work> work;
};
using GraphExecObject = GraphObject;

struct StreamObject {
  std::deque<Work> queue;
  GraphObject* capture = nullptr;
  bool after_kernel = false;  // the last that was put into it is a kernel
};

struct EventObject {
  StreamObject* stream = nullptr;
  int pending = 0;
  bool timed = false;
  double milliseconds = 0;
};

namespace {

struct Machine {
  int major = 9, minor = 0, sms = 132, devices = 1;
  uint64_t memory = uint64_t{1} << 30;
};

std::recursive_mutex lock;
Machine machine;
std::map<DeviceAddress, Allocation> memory;
std::map<char*, uint64_t> pinned;
std::set<StreamObject*> streams;
std::map<std::string, int> calls, launches;
std::map<std::string, std::pair<int, Result>> failures;
std::set<std::string> broken;
uint64_t allocated = 0;
int retained = 0, modules = 0, graphs = 0, events = 0;
Result sticky = kOk;
double now = 0;
decltype(&dsv4c_testing_run_kernel) run_kernel;
decltype(&dsv4c_testing_error) kernel_error;
thread_local int contexts = 0;

// Counts the call, and fails if a test asked for it.
Result entered(const char* name) {
  ++calls[name];
  const auto failure = failures.find(name);
  if (failure != failures.end() && failure->second.first-- == 0) return failure->second.second;
  return kOk;
}

#define ENTER(name)                                              \
  const std::lock_guard guard(lock);                             \
  if (const Result failure = entered(#name); failure != kOk) return failure

#define ENTER_CONTEXT(name)               \
  ENTER(name);                            \
  if (contexts == 0) return kInvalidContext; \
  if (sticky != kOk) return sticky

// The host's view of device memory, or null where [address, address + size) is in no allocation.
char* alias_of(DeviceAddress address, uint64_t size) {
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return nullptr;
  const auto& [start, allocation] = *std::prev(after);
  const uint64_t offset = address - start;
  if (offset > allocation.size || size > allocation.size - offset) return nullptr;
  return allocation.alias + offset;
}

bool is_pinned(const void* data, uint64_t size) {
  char* pointer = static_cast<char*>(const_cast<void*>(data));
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return pointer + size <= start + bytes;
}

Result run_one(StreamObject* stream) {
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  const Result result = work();
  if (result != kOk) {
    sticky = result;
    for (StreamObject* each : streams) each->queue.clear();
  }
  return result;
}

Result drain(StreamObject* stream) {
  while (!stream->queue.empty())
    if (const Result result = run_one(stream); result != kOk) return result;
  return kOk;
}

Result enqueue(StreamObject* stream, Work work) {
  if (stream->capture)
    stream->capture->work.push_back(std::move(work));
  else
    stream->queue.push_back(std::move(work));
  stream->after_kernel = false;
  return kOk;
}

// A copy to or from ordinary host memory is over when the call returns.
Result enqueue_copy(StreamObject* stream, const void* host, uint64_t size, Work work) {
  if (stream->capture) return kCaptureUnsupported;
  enqueue(stream, std::move(work));
  return is_pinned(host, size) ? kOk : drain(stream);
}

int64_t size_of(uint32_t dtype) {
  if (dtype == 9) return 8;
  return dtype == 1 || dtype == 8 ? 4 : dtype == 2 || dtype == 3 ? 2 : 1;
}

// A tensor as the operator wants it: sizes of this step, and memory that is really there.
bool resolve(const Argument& argument, const StepHeader& step, DeviceAddress address, dsv4c_testing_arg* out) {
  *out = argument.value;
  const int64_t dims[] = {0, step.tokens, step.logits_rows, step.slots, step.blocks, step.table_width};
  int64_t dense = 1, last = 0;
  bool empty = false;
  for (int i = static_cast<int>(out->ndim) - 1; i >= 0; --i) {
    if (argument.dim[i] != 0) out->size[i] = dims[argument.dim[i]];
    if (out->stride[i] < 0) out->stride[i] = dense;
    dense *= out->size[i];
    empty |= out->size[i] == 0;
    last += (out->size[i] - 1) * out->stride[i];
  }
  if (argument.is_mask && !step.has_mask) {
    out->kind = 0;
    return true;
  }
  if (empty) return true;
  out->data = alias_of(address, static_cast<uint64_t>((last + 1) * size_of(out->dtype)));
  if (!out->data) std::fprintf(stderr, "fake cuda: a tensor of %ld elements lies outside its allocation\n", last + 1);
  return out->data != nullptr;
}

// What a kernel may rely on; then first, begin, length and order of each row, for the operator `runs`.
bool read_runs(const StepHeader& step, std::vector<int32_t>* table) {
  const uint64_t bytes = static_cast<uint64_t>(step.tokens) * sizeof(int32_t);
  const int32_t* arrays[4];
  const DeviceAddress addresses[] = {step.run_first, step.run_begin, step.run_length, step.run_rows};
  for (int i = 0; i < 4; ++i)
    if (!(arrays[i] = reinterpret_cast<int32_t*>(alias_of(addresses[i], bytes)))) return false;
  for (int32_t row = 0; row < step.tokens; ++row) {
    const int32_t begin = arrays[1][row], length = arrays[2][row];
    if (begin < 0 || length < 1 || begin > step.tokens - length) return false;
    int found = 0;
    for (int32_t i = begin; i < begin + length; ++i) found += arrays[3][i] == row;
    if (found != 1) return false;
    for (const int32_t* array : arrays) table->push_back(array[row]);
  }
  return true;
}

Result execute(const FunctionObject& function, const std::vector<DeviceAddress>& parameters) {
  ++launches[function.entry];
  now += 1;
  if (broken.contains(function.entry)) return kIllegalAddress;
  const size_t pointers = function.pointers();
  const char* header = alias_of(parameters[pointers], sizeof(StepHeader));
  StepHeader step;
  std::vector<int32_t> runs;
  if (!header) return kIllegalAddress;
  std::memcpy(&step, header, sizeof step);
  if (step.arrivals != 0 || !read_runs(step, &runs)) return kIllegalAddress;
  for (size_t i = pointers + 1; i < parameters.size(); ++i)
    if (parameters[i] != 0) return kIllegalAddress;
  std::vector<dsv4c_testing_arg> arguments(function.arguments.size());
  size_t next = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Argument& argument = function.arguments[i];
    arguments[i] = argument.value;
    if (argument.value.kind == 1 && !resolve(argument, step, parameters[next++], &arguments[i])) return kIllegalAddress;
  }
  if (!run_kernel) return kOk;
  if (function.kernel == "runs") {
    std::memcpy(arguments[0].data, runs.data(), runs.size() * sizeof(int32_t));
    return kOk;
  }
  if (function.kernel == "copy") {
    uint64_t bytes = static_cast<uint64_t>(size_of(arguments[0].dtype));
    for (uint32_t i = 0; i < arguments[0].ndim; ++i) bytes *= static_cast<uint64_t>(arguments[0].size[i]);
    std::memcpy(arguments[1].data, arguments[0].data, bytes);
    return kOk;
  }
  const auto count = static_cast<uint32_t>(arguments.size());
  if (run_kernel(function.kernel.c_str(), arguments.data(), count, 1) == 0) return kOk;
  std::fprintf(stderr, "fake cuda: %s: %s\n", function.kernel.c_str(), kernel_error());
  return kLaunchFailed;
}

Result launch(FunctionObject* function, const unsigned* grid, const unsigned* block, unsigned shared,
              StreamObject* stream, void** given) {
  if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2]) return kInvalidValue;
  if (static_cast<int>(shared) > function->dynamic_limit) return kInvalidValue;
  std::vector<DeviceAddress> parameters;
  for (size_t i = 0; i < function->parameters(); ++i) parameters.push_back(*static_cast<DeviceAddress*>(given[i]));
  const Result result = enqueue(stream, [function, parameters] { return execute(*function, parameters); });
  stream->after_kernel = true;
  return result;
}

bool parse(std::istringstream& in, FunctionObject* function) {
  size_t count;
  in >> function->entry >> function->kernel >> function->extra_parameters >> function->static_bytes >> count;
  for (size_t i = 0; in && i < count; ++i) {
    std::string kind;
    in >> kind;
    Argument argument;
    dsv4c_testing_arg& value = argument.value;
    if (kind == "int") {
      value.kind = 2;
      in >> value.integer;
    } else if (kind == "float") {
      value.kind = 3;
      in >> value.integer;
      std::memcpy(&value.real, &value.integer, sizeof value.real);
    } else if (kind == "tensor") {
      value.kind = 1;
      in >> value.dtype >> argument.is_mask >> value.ndim;
      for (int j = 0; j < 4; ++j) in >> argument.dim[j] >> value.size[j] >> value.stride[j];
    } else if (kind != "none") {
      return false;
    }
    function->arguments.push_back(argument);
  }
  return static_cast<bool>(in);
}

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API Result cuInit(unsigned) {
  ENTER(cuInit);
  std::sscanf(environment("FAKE_CUDA_CAPABILITY", "9.0"), "%d.%d", &machine.major, &machine.minor);
  machine.sms = std::atoi(environment("FAKE_CUDA_SMS", "132"));
  machine.memory = std::strtoull(environment("FAKE_CUDA_MEMORY", "1073741824"), nullptr, 10);
  machine.devices = std::atoi(environment("FAKE_CUDA_DEVICES", "1"));
  return machine.devices > 0 ? kOk : kNoDevice;
}

API Result cuDriverGetVersion(int* version) {
  ENTER(cuDriverGetVersion);
  *version = std::atoi(environment("FAKE_CUDA_VERSION", "12040"));
  return kOk;
}

API Result cuGetErrorName(Result result, const char** text) {
  static const std::map<Result, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},       {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},               {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},   {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},               {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},       {kTooLarge, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
  };
  const auto found = names.find(result);
  if (found == names.end()) return kInvalidValue;
  *text = found->second;
  return kOk;
}
API Result cuGetErrorString(Result result, const char** text) {
  *text = result == kIllegalAddress ? "an illegal memory access was encountered"
          : result == kNoDevice     ? "no CUDA-capable device is detected"
                                    : "text of the driver";
  return kOk;
}

API Result cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  *count = machine.devices;
  return kOk;
}
API Result cuDeviceGet(int* device, int ordinal) {
  ENTER(cuDeviceGet);
  *device = ordinal;
  return ordinal < machine.devices ? kOk : kInvalidDevice;
}
API Result cuDeviceGetName(char* name, int size, int) {
  ENTER(cuDeviceGetName);
  std::snprintf(name, static_cast<size_t>(size), "Fake H100");
  return kOk;
}
API Result cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER(cuDeviceGetAttribute);
  const std::map<int, int> values = {{16, machine.sms}, {75, machine.major}, {76, machine.minor}, {97, 232448}};
  if (!values.contains(attribute)) return kInvalidValue;
  *value = values.at(attribute);
  return kOk;
}
API Result cuDevicePrimaryCtxRetain(void** context, int) {
  ENTER(cuDevicePrimaryCtxRetain);
  ++retained;
  *context = &machine;
  return kOk;
}
API Result cuDevicePrimaryCtxRelease_v2(int) {
  ENTER(cuDevicePrimaryCtxRelease_v2);
  --retained;
  return kOk;
}
API Result cuCtxPushCurrent_v2(void* context) {
  ENTER(cuCtxPushCurrent_v2);
  if (context != &machine || retained == 0) return kInvalidContext;
  ++contexts;
  return kOk;
}
API Result cuCtxPopCurrent_v2(void** context) {
  ENTER(cuCtxPopCurrent_v2);
  *context = &machine;
  if (contexts == 0) return kInvalidContext;
  --contexts;
  return kOk;
}

API Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER_CONTEXT(cuMemGetInfo_v2);
  *free = machine.memory - allocated;
  *total = machine.memory;
  return kOk;
}
API Result cuMemAlloc_v2(DeviceAddress* address, size_t size) {
  ENTER_CONTEXT(cuMemAlloc_v2);
  if (size == 0) return kInvalidValue;
  if (size > machine.memory - allocated) return kOutOfMemory;
  const int file = ::memfd_create("fake_cuda", 0);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  void* device = ::mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  void* alias = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (device == MAP_FAILED || alias == MAP_FAILED) return kOutOfMemory;
  std::memset(alias, 0xA5, size);
  *address = reinterpret_cast<DeviceAddress>(device);
  memory[*address] = {static_cast<char*>(alias), size};
  allocated += size;
  return kOk;
}
API Result cuMemFree_v2(DeviceAddress address) {
  ENTER_CONTEXT(cuMemFree_v2);
  const auto found = memory.find(address);
  if (found == memory.end()) return kInvalidValue;
  for (StreamObject* stream : streams) drain(stream);
  ::munmap(reinterpret_cast<void*>(address), found->second.size);
  ::munmap(found->second.alias, found->second.size);
  allocated -= found->second.size;
  memory.erase(found);
  return kOk;
}
API Result cuMemHostAlloc(void** data, size_t size, unsigned) {
  ENTER_CONTEXT(cuMemHostAlloc);
  char* made = static_cast<char*>(std::malloc(size));
  std::memset(made, 0xA5, size);
  pinned[made] = size;
  *data = made;
  return kOk;
}
API Result cuMemFreeHost(void* data) {
  ENTER_CONTEXT(cuMemFreeHost);
  if (pinned.erase(static_cast<char*>(data)) == 0) return kInvalidValue;
  std::free(data);
  return kOk;
}

API Result cuMemcpyHtoDAsync_v2(DeviceAddress to, const void* from, size_t size, StreamObject* stream) {
  ENTER_CONTEXT(cuMemcpyHtoDAsync_v2);
  char* target = alias_of(to, size);
  if (!target) return kInvalidValue;
  return enqueue_copy(stream, from, size, [=] {
    std::memcpy(target, from, size);
    return kOk;
  });
}
API Result cuMemcpyDtoHAsync_v2(void* to, DeviceAddress from, size_t size, StreamObject* stream) {
  ENTER_CONTEXT(cuMemcpyDtoHAsync_v2);
  const char* source = alias_of(from, size);
  if (!source) return kInvalidValue;
  return enqueue_copy(stream, to, size, [=] {
    std::memcpy(to, source, size);
    return kOk;
  });
}
API Result cuMemcpyDtoDAsync_v2(DeviceAddress to, DeviceAddress from, size_t size, StreamObject* stream) {
  ENTER_CONTEXT(cuMemcpyDtoDAsync_v2);
  char* target = alias_of(to, size);
  const char* source = alias_of(from, size);
  if (!target || !source) return kInvalidValue;
  return enqueue(stream, [=] {
    std::memcpy(target, source, size);
    return kOk;
  });
}
API Result cuMemsetD8Async(DeviceAddress at, unsigned char value, size_t size, StreamObject* stream) {
  ENTER_CONTEXT(cuMemsetD8Async);
  char* target = alias_of(at, size);
  if (!target) return kInvalidValue;
  return enqueue(stream, [=] {
    std::memset(target, value, size);
    return kOk;
  });
}

API Result cuStreamCreate(StreamObject** stream, unsigned flags) {
  ENTER_CONTEXT(cuStreamCreate);
  if (flags != 1) return kInvalidValue;
  *stream = new StreamObject;
  streams.insert(*stream);
  return kOk;
}
API Result cuStreamDestroy_v2(StreamObject* stream) {
  ENTER(cuStreamDestroy_v2);
  if (streams.erase(stream) == 0) return kInvalidHandle;
  delete stream;
  return kOk;
}
API Result cuStreamSynchronize(StreamObject* stream) {
  ENTER_CONTEXT(cuStreamSynchronize);
  return stream->capture ? kCaptureUnsupported : drain(stream);
}
API Result cuStreamBeginCapture_v2(StreamObject* stream, int) {
  ENTER_CONTEXT(cuStreamBeginCapture_v2);
  if (stream->capture) return kInvalidValue;
  stream->capture = new GraphObject;
  ++graphs;
  return kOk;
}
API Result cuStreamEndCapture(StreamObject* stream, GraphObject** graph) {
  ENTER_CONTEXT(cuStreamEndCapture);
  if (!stream->capture) return kInvalidValue;
  *graph = std::exchange(stream->capture, nullptr);
  return kOk;
}
API Result cuGraphDestroy(GraphObject* graph) {
  ENTER(cuGraphDestroy);
  --graphs;
  delete graph;
  return kOk;
}
API Result cuGraphInstantiateWithFlags(GraphExecObject** exec, GraphObject* graph, unsigned long long) {
  ENTER_CONTEXT(cuGraphInstantiateWithFlags);
  *exec = new GraphObject(*graph);
  ++graphs;
  return kOk;
}
API Result cuGraphExecDestroy(GraphExecObject* exec) {
  ENTER(cuGraphExecDestroy);
  --graphs;
  delete exec;
  return kOk;
}
API Result cuGraphLaunch(GraphExecObject* exec, StreamObject* stream) {
  ENTER_CONTEXT(cuGraphLaunch);
  for (const Work& work : exec->work) enqueue(stream, work);
  return kOk;
}

API Result cuEventCreate(EventObject** event, unsigned) {
  ENTER_CONTEXT(cuEventCreate);
  *event = new EventObject;
  ++events;
  return kOk;
}
API Result cuEventDestroy_v2(EventObject* event) {
  ENTER(cuEventDestroy_v2);
  --events;
  delete event;
  return kOk;
}
API Result cuEventRecordWithFlags(EventObject* event, StreamObject* stream, unsigned flags) {
  ENTER_CONTEXT(cuEventRecordWithFlags);
  if ((flags == 1) != (stream->capture != nullptr)) return kInvalidValue;
  event->stream = stream;
  if (!stream->capture) ++event->pending;
  return enqueue(stream, [event, external = flags == 1] {
    if (!external) --event->pending;
    event->timed = true;
    event->milliseconds = now;
    return kOk;
  });
}
API Result cuEventRecord(EventObject* event, StreamObject* stream) {
  ENTER_CONTEXT(cuEventRecord);
  if (stream->capture) {
    event->timed = false;  // an edge of the graph only
    return kOk;
  }
  return cuEventRecordWithFlags(event, stream, 0);
}
API Result cuEventSynchronize(EventObject* event) {
  ENTER_CONTEXT(cuEventSynchronize);
  while (event->pending > 0)
    if (const Result result = run_one(event->stream); result != kOk) return result;
  return kOk;
}
API Result cuEventElapsedTime(float* milliseconds, EventObject* start, EventObject* end) {
  ENTER_CONTEXT(cuEventElapsedTime);
  if (!start->timed || !end->timed || start->pending || end->pending) return kInvalidHandle;
  *milliseconds = static_cast<float>(end->milliseconds - start->milliseconds);
  return kOk;
}

API Result cuModuleLoadData(ModuleObject** module, const char* image) {
  ENTER_CONTEXT(cuModuleLoadData);
  std::istringstream in(image);
  std::string word;
  in >> word;
  if (word != "fake-cubin") return kInvalidImage;
  auto* made = new ModuleObject;
  while (in >> word && word == "kernel") {
    FunctionObject function;
    if (!parse(in, &function)) break;
    made->functions[function.entry] = function;
  }
  if (word != "end") {
    delete made;
    return kInvalidImage;
  }
  *module = made;
  ++modules;
  return kOk;
}
API Result cuModuleUnload(ModuleObject* module) {
  ENTER_CONTEXT(cuModuleUnload);
  --modules;
  delete module;
  return kOk;
}
API Result cuModuleGetFunction(FunctionObject** function, ModuleObject* module, const char* name) {
  ENTER_CONTEXT(cuModuleGetFunction);
  const auto found = module->functions.find(name);
  if (found == module->functions.end()) return kNotFound;
  *function = &found->second;
  return kOk;
}
API Result cuFuncGetAttribute(int* value, int attribute, FunctionObject* function) {
  ENTER_CONTEXT(cuFuncGetAttribute);
  if (attribute > 1) return kInvalidValue;
  *value = attribute == 0 ? 1024 : function->static_bytes;
  return kOk;
}
API Result cuFuncSetAttribute(FunctionObject* function, int attribute, int value) {
  ENTER_CONTEXT(cuFuncSetAttribute);
  if (attribute == 8) function->dynamic_limit = value;
  return attribute == 8 || attribute == 14 ? kOk : kInvalidValue;
}
API Result cuFuncLoad(FunctionObject*) {
  ENTER_CONTEXT(cuFuncLoad);
  return kOk;
}
API Result cuFuncGetParamInfo(FunctionObject* function, size_t index, size_t* offset, size_t* size) {
  ENTER_CONTEXT(cuFuncGetParamInfo);
  *offset = 8 * index;
  *size = 8;
  return index < function->parameters() ? kOk : kInvalidValue;
}

API Result cuLaunchKernel(FunctionObject* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, StreamObject* stream, void** parameters,
                          void**) {
  ENTER_CONTEXT(cuLaunchKernel);
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return launch(function, grid, block, shared, stream, parameters);
}
API Result cuLaunchKernelEx(const LaunchConfig* config, FunctionObject* function, void** parameters, void**) {
  ENTER_CONTEXT(cuLaunchKernelEx);
  auto* const stream = reinterpret_cast<StreamObject*>(config->stream);
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const auto& attribute = config->attributes[i];
    if (attribute.id == 2 && attribute.value.cooperative == 1) {
      ++launches["cooperative"];
      if (config->grid[0] > static_cast<unsigned>(machine.sms)) return kTooLarge;
    } else if (attribute.id == 4 && config->grid[0] % attribute.value.cluster[0] == 0) {
      ++launches["cluster"];
    } else if (attribute.id == 6 && attribute.value.programmatic_serialization_allowed == 1 && stream->after_kernel) {
      // A driver takes it behind anything; the runtime means the kernel before.
      ++launches[stream->capture ? "programmatic in a graph" : "programmatic"];
    } else {
      return kInvalidValue;
    }
  }
  return launch(function, config->grid, config->block, config->shared_bytes, stream, parameters);
}

// For the tests.

// Where the operators are: the runtime library itself. Without them kernels check their arguments only.
API int fake_use_kernels(const char* library) {
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return 1;
  run_kernel = reinterpret_cast<decltype(run_kernel)>(::dlsym(handle, "dsv4c_testing_run_kernel"));
  kernel_error = reinterpret_cast<decltype(kernel_error)>(::dlsym(handle, "dsv4c_testing_error"));
  return run_kernel && kernel_error ? 0 : 1;
}
// The call number `after` from now (0: the next) of a function of the driver fails.
API void fake_fail(const char* name, int after, int result) {
  const std::lock_guard guard(lock);
  failures[name] = {after, result};
}
// A launch of the entry ends with an illegal memory access.
API void fake_break(const char* entry) {
  const std::lock_guard guard(lock);
  broken.insert(entry);
}
// The device works again after an error that a driver would not forget.
API void fake_revive() {
  const std::lock_guard guard(lock);
  sticky = kOk;
}
API int fake_calls(const char* name) {
  const std::lock_guard guard(lock);
  return calls[name];
}
API int fake_launches(const char* entry) {
  const std::lock_guard guard(lock);
  return launches[entry];
}
API uint64_t fake_allocated() {
  const std::lock_guard guard(lock);
  return allocated;
}
// Objects that nobody has given back.
API int fake_objects() {
  const std::lock_guard guard(lock);
  return retained + modules + graphs + events + static_cast<int>(memory.size() + pinned.size() + streams.size());
}
