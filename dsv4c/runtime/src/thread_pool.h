#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dsv4c {

// Threads that share the pieces of a loop. The pieces depend on `count` and `grain` only, never on the number of
// threads, so a kernel that reduces within a piece gives the same bits on every machine.
class ThreadPool {
 public:
  // 0: one thread per processor. The calling thread is one of them.
  explicit ThreadPool(unsigned threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned thread_count() const { return static_cast<unsigned>(workers_.size()) + 1; }

  // Calls body(begin, end) for consecutive ranges of at most `grain` of [0, count), in any order and from several
  // threads, and returns when all are done. The first exception of a body is rethrown. A call from inside a body, or
  // while another session is using the pool, runs in the calling thread alone.
  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Piece = void (*)(void* context, int64_t begin, int64_t end);
  struct Loop {
    Piece piece = nullptr;
    void* context = nullptr;
    int64_t count = 0;
    int64_t grain = 1;
  };

  void run(int64_t count, int64_t grain, Piece piece, void* context);
  void work();
  void take_pieces(const Loop& loop);

  std::vector<std::thread> workers_;
  std::atomic<bool> in_use_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable finished_;
  // Guarded by mutex_.
  Loop loop_;
  uint64_t generation_ = 0;
  bool open_ = false;    // the loop of this generation still takes workers
  unsigned active_ = 0;  // workers inside it
  bool stop_ = false;
  std::exception_ptr error_;
  // First index nobody has taken yet.
  std::atomic<int64_t> next_{0};
};

}  // namespace dsv4c
