#include "cuda/graph_cache.h"

#include <utility>

namespace dsv4c::cuda {

Graph::Graph(const Device& device, const Stream& stream, const std::function<void()>& launch) : device_(device) {
  const Driver& driver = device.driver();
  driver.check(driver.stream_begin_capture(stream.handle(), kCaptureThreadLocal), "beginning to record a graph");
  GraphHandle graph = nullptr;
  try {
    launch();
  } catch (...) {
    // The stream must not stay in capture.
    if (driver.stream_end_capture(stream.handle(), &graph) == kSuccess && graph) driver.graph_destroy(graph);
    throw;
  }
  driver.check(driver.stream_end_capture(stream.handle(), &graph), "recording a graph");
  const Result result = driver.graph_instantiate(&handle_, graph, 0);
  driver.graph_destroy(graph);
  driver.check(result, "making a graph ready");
}

Graph::~Graph() {
  if (handle_) device_.driver().graph_exec_destroy(handle_);
}

Graph::Graph(Graph&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

void Graph::replay(const Stream& stream) const {
  device_.driver().check(device_.driver().graph_launch(handle_, stream.handle()), "starting a graph");
}

}  // namespace dsv4c::cuda
