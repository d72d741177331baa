#include "cuda/device.h"

#include <cinttypes>
#include <cstdio>
#include <utility>

#include "error.h"

namespace dsv4c::cuda {
namespace {

std::string size_text(uint64_t bytes) {
  char text[40];
  const double size = static_cast<double>(bytes);
  if (bytes >= 100'000'000)
    std::snprintf(text, sizeof text, "%.2f GB", size / 1e9);
  else if (bytes >= 100'000)
    std::snprintf(text, sizeof text, "%.2f MB", size / 1e6);
  else
    std::snprintf(text, sizeof text, "%" PRIu64 " bytes", bytes);
  return text;
}

}  // namespace

Device::Device(unsigned ordinal, const std::string& arch) : driver_(load_driver(arch.c_str())) {
  int count = 0;
  driver_.check(driver_.device_get_count(&count), "counting the GPUs");
  if (ordinal >= static_cast<unsigned>(count))
    fail(DSV4C_INVALID_ARGUMENT, "GPU %u does not exist; this machine has %d", ordinal, count);
  driver_.check(driver_.device_get(&handle_, static_cast<int>(ordinal)), "asking for the GPU");
  char name[80] = {};
  driver_.check(driver_.device_get_name(name, sizeof name - 1, handle_), "asking for the GPU's name");
  name_ = "GPU " + std::to_string(ordinal) + " (" + name + ")";
  const int major = attribute(kComputeCapabilityMajor), minor = attribute(kComputeCapabilityMinor);
  const std::string found = "sm_" + std::to_string(major) + std::to_string(minor);
  // "sm_90a" is code for compute capability 9.0 and no other.
  const std::string wanted = arch.ends_with('a') ? arch.substr(0, arch.size() - 1) : arch;
  if (found != wanted)
    fail(DSV4C_ARCH, "engine is for %s, %s is %s (compute capability %d.%d)", arch.c_str(), name_.c_str(),
         found.c_str(), major, minor);
  sm_count_ = static_cast<uint32_t>(attribute(kMultiprocessorCount));
  shared_bytes_limit_ = static_cast<uint32_t>(attribute(kMaxSharedMemoryPerBlockOptin));
}

Device::~Device() {
  if (context_) driver_.primary_context_release(handle_);
}

int Device::attribute(DeviceAttribute which) const {
  int value = 0;
  driver_.check(driver_.device_get_attribute(&value, which, handle_), "asking for an attribute of the GPU");
  return value;
}

void Device::open_context() {
  driver_.check(driver_.primary_context_retain(&context_, handle_), "opening the GPU");
}

CurrentContext::CurrentContext(const Device& device) : driver_(device.driver()) {
  driver_.check(driver_.context_push(device.context()), "choosing the GPU");
}

CurrentContext::~CurrentContext() {
  ContextHandle popped;
  driver_.context_pop(&popped);
}

DeviceMemory::DeviceMemory(const Device& device, uint64_t size, const char* what) : device_(&device), size_(size) {
  if (size == 0) return;
  const Driver& driver = device.driver();
  const Result result = driver.memory_allocate(&address_, size);
  if (result == kOutOfMemory) {
    size_t free = 0, total = 0;
    driver.memory_info(&free, &total);
    fail(DSV4C_OUT_OF_MEMORY, "no memory for %s: %s needed on %s, %s free of %s", what, size_text(size).c_str(),
         device.name().c_str(), size_text(free).c_str(), size_text(total).c_str());
  }
  driver.check(result, "allocating memory");
}

DeviceMemory::~DeviceMemory() {
  if (address_) device_->driver().memory_free(address_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), address_(std::exchange(other.address_, 0)), size_(std::exchange(other.size_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

PinnedMemory::PinnedMemory(const Device& device, uint64_t size, const char* what) : device_(&device), size_(size) {
  if (size == 0) return;
  void* data = nullptr;
  const Result result = device.driver().host_allocate(&data, size, kHostAllocPortable);
  if (result == kOutOfMemory)
    fail(DSV4C_OUT_OF_MEMORY, "no pinned host memory for %s: %s needed", what, size_text(size).c_str());
  device.driver().check(result, "allocating pinned host memory");
  data_ = static_cast<std::byte*>(data);
}

PinnedMemory::~PinnedMemory() {
  if (data_) device_->driver().host_free(data_);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Stream::Stream(const Device& device) : device_(device) {
  device.driver().check(device.driver().stream_create(&handle_, kStreamNonBlocking), "creating a stream");
}

Stream::~Stream() {
  // Memory that its copies read or write may go next.
  device_.driver().stream_synchronize(handle_);
  device_.driver().stream_destroy(handle_);
}

void Stream::synchronize(const char* where) const {
  device_.driver().check(device_.driver().stream_synchronize(handle_), where);
}

Event::Event(const Device& device, unsigned flags) : device_(device) {
  device.driver().check(device.driver().event_create(&handle_, flags), "creating an event");
}

Event::~Event() {
  if (handle_) device_.driver().event_destroy(handle_);
}

Event::Event(Event&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

}  // namespace dsv4c::cuda
