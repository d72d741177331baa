#pragma once

#include <cstddef>
#include <cstdint>

// The part of NVIDIA's driver interface that the runtime calls, declared here so that building needs no toolkit. Names
// and numbers are those of cuda.h; they are part of the driver's binary interface and do not change.
namespace dsv4c::cuda {

using Result = int;
using DeviceAddress = uint64_t;
using ContextHandle = struct ContextObject*;
using StreamHandle = struct StreamObject*;
using EventHandle = struct EventObject*;
using ModuleHandle = struct ModuleObject*;
using FunctionHandle = struct FunctionObject*;
using GraphHandle = struct GraphObject*;
using GraphExecHandle = struct GraphExecObject*;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kEventRecordExternal = 1;
constexpr unsigned kHostAllocPortable = 1;
constexpr int kCaptureThreadLocal = 1;

enum LaunchAttributeId : int {
  kAttributeCooperative = 2,
  kAttributeClusterDimension = 4,
  kAttributeProgrammaticStreamSerialization = 6,
};

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int cooperative;
    int programmatic_serialization_allowed;
    unsigned cluster[3];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// Of drivers since which programmatic launches can be captured into graphs (CUDA 12.3); before it, such a launch waits
// for the one before it as any other.
constexpr int kProgrammaticVersion = 12030;

// Functions of libcuda.so.1. Those that came with a later driver than the oldest supported one may be null.
struct Driver {
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*init)(unsigned flags);
  Result (*get_version)(int*);
  Result (*device_get_count)(int*);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_get_name)(char* name, int size, int device);
  Result (*device_get_attribute)(int* value, int attribute, int device);
  Result (*primary_context_retain)(ContextHandle*, int device);
  Result (*primary_context_release)(int device);
  Result (*context_push)(ContextHandle);
  Result (*context_pop)(ContextHandle*);
  Result (*memory_info)(size_t* free, size_t* total);
  Result (*memory_allocate)(DeviceAddress*, size_t);
  Result (*memory_free)(DeviceAddress);
  Result (*host_allocate)(void**, size_t, unsigned flags);
  Result (*host_free)(void*);
  Result (*copy_to_device)(DeviceAddress, const void*, size_t, StreamHandle);
  Result (*copy_to_host)(void*, DeviceAddress, size_t, StreamHandle);
  Result (*copy_on_device)(DeviceAddress, DeviceAddress, size_t, StreamHandle);
  Result (*fill)(DeviceAddress, unsigned char, size_t, StreamHandle);
  Result (*stream_create)(StreamHandle*, unsigned flags);
  Result (*stream_destroy)(StreamHandle);
  Result (*stream_synchronize)(StreamHandle);
  Result (*stream_begin_capture)(StreamHandle, int mode);
  Result (*stream_end_capture)(StreamHandle, GraphHandle*);
  Result (*event_create)(EventHandle*, unsigned flags);
  Result (*event_destroy)(EventHandle);
  Result (*event_record)(EventHandle, StreamHandle);
  Result (*event_record_with_flags)(EventHandle, StreamHandle, unsigned flags);
  Result (*event_synchronize)(EventHandle);
  Result (*event_elapsed_time)(float* milliseconds, EventHandle start, EventHandle end);
  Result (*module_load_data)(ModuleHandle*, const void* image);
  Result (*module_unload)(ModuleHandle);
  Result (*module_get_function)(FunctionHandle*, ModuleHandle, const char* name);
  Result (*function_get_attribute)(int* value, int attribute, FunctionHandle);
  Result (*function_set_attribute)(FunctionHandle, int attribute, int value);
  Result (*function_load)(FunctionHandle);  // may be null
  Result (*function_get_param_info)(FunctionHandle, size_t index, size_t* offset, size_t* size);  // may be null
  Result (*launch_kernel)(FunctionHandle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, StreamHandle, void** parameters,
                          void** extra);
  Result (*launch_kernel_ex)(const LaunchConfig*, FunctionHandle, void** parameters, void** extra);
  Result (*graph_instantiate)(GraphExecHandle*, GraphHandle, unsigned long long flags);
  Result (*graph_launch)(GraphExecHandle, StreamHandle);
  Result (*graph_exec_destroy)(GraphExecHandle);
  Result (*graph_destroy)(GraphHandle);

  int version = 0;  // of CUDA that the driver came with: 1000 * major + 10 * minor

  // Throws the error's name and text, then `where`.
  void check(Result result, const char* where) const;
};

// Loaded and initialised once a process. `arch` says in errors what the engine is for.
const Driver& load_driver(const char* arch);

}  // namespace dsv4c::cuda
