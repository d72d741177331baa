#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dsv4c {

// A file mapped read-only. Pages are read when touched. It stays open, for readers that would rather not map it.
class MappedFile {
 public:
  MappedFile() = default;
  // `what` names the file in errors: "engine", "weights file".
  MappedFile(const std::string& path, const char* what);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  const std::byte* data_ = nullptr;  // null for an empty file
  uint64_t size_ = 0;
};

}  // namespace dsv4c
