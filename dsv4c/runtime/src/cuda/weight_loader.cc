#include "cuda/weight_loader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "error.h"

namespace dsv4c::cuda {
namespace {

// On an H200 with 16 cores, from the page cache: 512 KiB 24 GB/s, 1 MiB 40, 2 MiB 45, 8 MiB 32 of the link's 55. Small
// pieces pay for starting copies; of large ones less is still in the processor's cache when it travels.
constexpr uint64_t kPieceBytes = 2 << 20;
// One thread reads some 5 GB/s from the page cache; a PCIe 5.0 link takes 50.
constexpr unsigned kMostThreads = 16;
// While one piece travels, the next is read.
constexpr size_t kBuffers = 2;

void read_piece(const WeightSource& source, uint64_t at, std::byte* to, uint64_t size) {
  // Asks for the piece as a whole: threads that share a file confuse the system's own reading ahead.
  ::posix_fadvise(source.descriptor, static_cast<off_t>(source.offset + at), static_cast<off_t>(size),
                  POSIX_FADV_WILLNEED);
  while (size > 0) {
    const ssize_t count = ::pread(source.descriptor, to, size, static_cast<off_t>(source.offset + at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(DSV4C_IO, "cannot read the weights at byte %" PRIu64 ": %s", at, std::strerror(errno));
    if (count == 0) fail(DSV4C_IO, "the weights end at byte %" PRIu64 ": the file has become shorter", at);
    to += count;
    at += static_cast<uint64_t>(count);
    size -= static_cast<uint64_t>(count);
  }
}

class Loader {
 public:
  Loader(const Device& device, const WeightSource& source, const DeviceMemory& weights)
      : device_(device), source_(source), weights_(weights) {}

  void run(unsigned threads) {
    const uint64_t pieces = (weights_.size() + kPieceBytes - 1) / kPieceBytes;
    const auto count = static_cast<unsigned>(std::min<uint64_t>({threads, kMostThreads, pieces}));
    std::vector<std::thread> workers;
    try {
      for (unsigned i = 1; i < count; ++i) workers.emplace_back([this] { work(); });
    } catch (const std::exception&) {
      // Fewer threads do as well.
    }
    work();
    for (std::thread& worker : workers) worker.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work() {
    try {
      const CurrentContext current(device_);
      copy_pieces();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_ = weights_.size();  // the others need not go on
    }
  }

  void copy_pieces() {
    const Driver& driver = device_.driver();
    const uint64_t room = std::min(kPieceBytes, weights_.size());
    const PinnedMemory staging(device_, kBuffers * room, "loading the weights");
    const Stream stream(device_);
    std::vector<Event> copied;
    for (size_t i = 0; i < kBuffers; ++i) copied.emplace_back(device_, kEventBlockingSync | kEventDisableTiming);
    for (uint64_t number = 0;; ++number) {
      const uint64_t at = next_.fetch_add(kPieceBytes);
      if (at >= weights_.size()) break;
      const size_t buffer = number % kBuffers;
      if (number >= kBuffers)
        driver.check(driver.event_synchronize(copied[buffer].handle()), "loading the weights");
      const uint64_t size = std::min(kPieceBytes, weights_.size() - at);
      std::byte* piece = staging.data() + buffer * room;
      read_piece(source_, at, piece, size);
      driver.check(driver.copy_to_device(weights_.address() + at, piece, size, stream.handle()), "loading the weights");
      driver.check(driver.event_record(copied[buffer].handle(), stream.handle()), "loading the weights");
    }
    stream.synchronize("loading the weights");
  }

  const Device& device_;
  const WeightSource& source_;
  const DeviceMemory& weights_;
  std::atomic<uint64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void load_weights(const Device& device, const WeightSource& source, const DeviceMemory& weights, unsigned threads) {
  if (weights.size() > 0) Loader(device, source, weights).run(threads);
}

}  // namespace dsv4c::cuda
