#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dsv4c {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(const void* data, size_t size);
  // Ends the message; the object is of no use afterwards.
  Digest finish();

 private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64];
  size_t pending_size_ = 0;
  uint64_t total_bytes_ = 0;
};

Digest sha256(const void* data, size_t size);

}  // namespace dsv4c
