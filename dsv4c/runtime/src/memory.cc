#include "memory.h"

#include <sys/mman.h>

#include <cinttypes>
#include <utility>

#include "error.h"

namespace dsv4c {

Memory::Memory(uint64_t size, const char* what) : size_(size) {
  if (size == 0) return;
  void* address = MAP_FAILED;
  if (size <= static_cast<uint64_t>(PTRDIFF_MAX))
    address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) fail(DSV4C_OUT_OF_MEMORY, "no memory for %s: %" PRIu64 " bytes", what, size);
  data_ = static_cast<std::byte*>(address);
}

Memory::~Memory() {
  if (data_) ::munmap(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace dsv4c
