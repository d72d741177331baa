#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace dsv4c::cuda {

// One GPU. Asking for it touches no memory there; `open_context` does.
class Device {
 public:
  // Refuses a GPU that cannot run code for `arch`.
  Device(unsigned ordinal, const std::string& arch);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void open_context();

  const Driver& driver() const { return driver_; }
  ContextHandle context() const { return context_; }
  const std::string& name() const { return name_; }  // "GPU 0 (NVIDIA H200)"
  uint32_t sm_count() const { return sm_count_; }
  uint32_t shared_bytes_limit() const { return shared_bytes_limit_; }  // of a block

 private:
  int attribute(DeviceAttribute which) const;

  const Driver& driver_;
  int handle_ = 0;
  std::string name_;
  uint32_t sm_count_ = 0;
  uint32_t shared_bytes_limit_ = 0;
  ContextHandle context_ = nullptr;
};

// Makes the device's context that of this thread while it lives. Every other class here needs one in its caller.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Not cleared. `what` says in errors what the memory was for.
  DeviceMemory(const Device& device, uint64_t size, const char* what);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  DeviceAddress address() const { return address_; }
  uint64_t size() const { return size_; }

 private:
  const Device* device_ = nullptr;
  DeviceAddress address_ = 0;
  uint64_t size_ = 0;
};

// Host memory that the GPU copies from and to by itself.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const Device& device, uint64_t size, const char* what);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  const Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

class Stream {
 public:
  explicit Stream(const Device& device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }
  // Throws the error of anything that ran in it; `where` is added to its text.
  void synchronize(const char* where) const;

 private:
  const Device& device_;
  StreamHandle handle_ = nullptr;
};

class Event {
 public:
  Event(const Device& device, unsigned flags);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;

  EventHandle handle() const { return handle_; }

 private:
  const Device& device_;
  EventHandle handle_ = nullptr;
};

}  // namespace dsv4c::cuda
