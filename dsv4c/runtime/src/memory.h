#pragma once

#include <cstddef>
#include <cstdint>

namespace dsv4c {

// Zeroed, page-aligned memory. The system gives its pages when they are first written, so a large context costs
// nothing before it is used.
class Memory {
 public:
  Memory() = default;
  // `what` says in errors what the memory was for.
  Memory(uint64_t size, const char* what);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace dsv4c
