// SPDX-License-Identifier: Apache-2.0
// A fixed set of worker threads. Waits sleep. Work is split by item, never by thread, so results do not depend on the pool's size.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "waybill/export.h"

namespace waybill {

class WB_API ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // counts the calling thread; 1 = no worker
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls body(begin, end) over [0, count) in chunks of `grain` items and returns when all are done. Chunks are handed out
  // dynamically, the caller takes part. The first exception of a body is rethrown here. One parallel_for at a time per pool
  // (a nested or concurrent call runs in the calling thread).
  void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t begin, std::int64_t end)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Runs body over the pool, or in the calling thread when pool is null.
inline void parallel_for(ThreadPool* pool, std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  if (pool == nullptr || pool->num_threads() == 1 || count <= grain) {
    body(0, count);
  } else {
    pool->parallel_for(count, grain, body);
  }
}

// Hardware threads this process may use (respects CPU affinity), at least 1.
WB_API int num_usable_cores();

}  // namespace waybill
