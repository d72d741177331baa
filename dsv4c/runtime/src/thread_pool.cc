#include "thread_pool.h"

#include <algorithm>
#include <utility>

namespace dsv4c {

ThreadPool::ThreadPool(unsigned threads) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  workers_.reserve(threads - 1);
  try {
    for (unsigned i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::exception&) {
    // The system gives no more threads: those that exist do the work.
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::take_pieces(const Loop& loop) {
  try {
    for (;;) {
      const int64_t begin = next_.fetch_add(loop.grain, std::memory_order_relaxed);
      if (begin >= loop.count) return;
      loop.piece(loop.context, begin, std::min(begin + loop.grain, loop.count));
    }
  } catch (...) {
    next_.store(loop.count, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::run(int64_t count, int64_t grain, Piece piece, void* context) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (count <= grain || workers_.empty() || in_use_.exchange(true, std::memory_order_acquire)) {
    for (int64_t begin = 0; begin < count; begin += grain) piece(context, begin, std::min(begin + grain, count));
    return;
  }
  Loop loop{piece, context, count, grain};
  {
    std::lock_guard lock(mutex_);
    loop_ = loop;
    next_.store(0, std::memory_order_relaxed);
    open_ = true;
    ++generation_;
  }
  wake_.notify_all();
  take_pieces(loop);
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    // Nothing is left to take: a worker that is still waking up is not waited for.
    open_ = false;
    finished_.wait(lock, [this] { return active_ == 0; });
    error = std::exchange(error_, nullptr);
  }
  in_use_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

void ThreadPool::work() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || (open_ && generation_ != seen); });
    if (stop_) return;
    seen = generation_;
    ++active_;
    const Loop loop = loop_;
    lock.unlock();
    take_pieces(loop);
    lock.lock();
    if (--active_ == 0) finished_.notify_one();
  }
}

}  // namespace dsv4c
