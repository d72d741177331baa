#pragma once

#include <cstdint>

#include "cuda/device.h"

namespace dsv4c::cuda {

// Where the bytes of the weights are: an open file.
struct WeightSource {
  int descriptor;
  uint64_t offset;
};

// Copies the weights to the GPU: `threads` of them read the file into pinned memory while earlier pieces travel.
void load_weights(const Device& device, const WeightSource& source, const DeviceMemory& weights, unsigned threads);

}  // namespace dsv4c::cuda
