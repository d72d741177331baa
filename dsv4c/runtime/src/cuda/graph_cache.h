#pragma once

#include <functional>
#include <map>

#include "cuda/device.h"

namespace dsv4c::cuda {

// Launches as one object, which the driver starts much faster than one by one.
class Graph {
 public:
  // Records what `launch` puts into the stream, which does not run it.
  Graph(const Device& device, const Stream& stream, const std::function<void()>& launch);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;

  void replay(const Stream& stream) const;

 private:
  const Device& device_;
  GraphExecHandle handle_ = nullptr;
};

// The graphs of a session: one a bucket and kind of step. They hold addresses, and are dropped when one changes.
class GraphCache {
 public:
  // `addresses_version` is another number when addresses have changed since the last call.
  const Graph& get(uint64_t key, uint64_t addresses_version, const std::function<Graph()>& make) {
    if (version_ != addresses_version) graphs_.clear();
    version_ = addresses_version;
    const auto found = graphs_.find(key);
    return found != graphs_.end() ? found->second : graphs_.emplace(key, make()).first->second;
  }

 private:
  uint64_t version_ = 0;
  std::map<uint64_t, Graph> graphs_;
};

}  // namespace dsv4c::cuda
