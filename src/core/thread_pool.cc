// SPDX-License-Identifier: Apache-2.0
#include "waybill/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "waybill/error.h"

namespace waybill {

struct ThreadPool::Impl {
  struct Job {
    std::int64_t count = 0, grain = 1;
    const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
    std::atomic<std::int64_t> next{0};
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  Job* job = nullptr;
  std::uint64_t generation = 0;
  int active = 0;  // workers inside the current job
  bool stopping = false;
  std::atomic<bool> busy{false};

  void run(Job& current) {
    for (;;) {
      const std::int64_t begin = current.next.fetch_add(current.grain, std::memory_order_relaxed);
      if (begin >= current.count) return;
      try {
        (*current.body)(begin, std::min(begin + current.grain, current.count));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!current.error) current.error = std::current_exception();
        current.next.store(current.count, std::memory_order_relaxed);
        return;
      }
    }
  }

  void worker() {
    std::uint64_t seen = 0;
    for (;;) {
      Job* current = nullptr;
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stopping || (generation != seen && job != nullptr); });
        if (stopping) return;
        seen = generation;
        current = job;
        ++active;
      }
      run(*current);
      {
        const std::lock_guard lock(mutex);
        --active;
      }
      done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  WB_CHECK(num_threads >= 1 && num_threads <= 4096, "a thread pool needs 1 to 4096 threads, got {}", num_threads);
  for (int i = 1; i < num_threads; ++i) impl_->workers.emplace_back([this] { impl_->worker(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::num_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (impl_->workers.empty() || count <= grain || impl_->busy.exchange(true)) {
    body(0, count);
    return;
  }
  Impl::Job job;
  job.count = count;
  job.grain = grain;
  job.body = &body;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->job = &job;
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->run(job);
  {
    std::unique_lock lock(impl_->mutex);
    impl_->job = nullptr;  // workers that did not wake in time must not see a dead job
    impl_->done.wait(lock, [&] { return impl_->active == 0; });
  }
  impl_->busy.store(false);
  if (job.error) std::rethrow_exception(job.error);
}

int num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

}  // namespace waybill
