#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace dsv4c {

MappedFile::MappedFile(const std::string& path, const char* what) {
  // Without waiting: the path may be a pipe that nobody writes to.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(DSV4C_IO, "cannot open %s %s: %s", what, path.c_str(), std::strerror(errno));
  struct stat status;
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file);
    fail(DSV4C_IO, "%s %s is not a regular file", what, path.c_str());
  }
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ > 0) {
    void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    if (address == MAP_FAILED) {
      ::close(file);
      fail(DSV4C_IO, "cannot map %s %s: %s", what, path.c_str(), std::strerror(error));
    }
    data_ = static_cast<const std::byte*>(address);
  }
  descriptor_ = file;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace dsv4c
