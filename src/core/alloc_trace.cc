// SPDX-License-Identifier: Apache-2.0
#include "core/alloc_trace.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <vector>

#include "waybill/tensor.h"

namespace waybill {

struct AllocationTrace::Record {
  mutable std::mutex mutex;
  std::vector<std::size_t> sizes;
};

namespace {

// A sink is what note_allocation writes to: the public Record without its private name.
struct Sink {
  std::mutex* mutex;
  std::vector<std::size_t>* sizes;
};
std::mutex g_sinks_mutex;
std::vector<Sink> g_sinks;
std::atomic<int> g_num_sinks{0};

}  // namespace

namespace detail {

void note_allocation(std::size_t bytes) {
  if (g_num_sinks.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(g_sinks_mutex);
  for (const Sink& sink : g_sinks) {
    const std::lock_guard sink_lock(*sink.mutex);
    sink.sizes->push_back(bytes);
  }
}

}  // namespace detail

AllocationTrace::AllocationTrace() : record_(std::make_unique<Record>()) {
  const std::lock_guard lock(g_sinks_mutex);
  g_sinks.push_back(Sink{&record_->mutex, &record_->sizes});
  g_num_sinks.fetch_add(1);
}

AllocationTrace::~AllocationTrace() {
  const std::lock_guard lock(g_sinks_mutex);
  std::erase_if(g_sinks, [this](const Sink& sink) { return sink.sizes == &record_->sizes; });
  g_num_sinks.fetch_sub(1);
}

std::size_t AllocationTrace::count() const {
  const std::lock_guard lock(record_->mutex);
  return record_->sizes.size();
}

std::size_t AllocationTrace::count_of(std::size_t bytes) const {
  const std::lock_guard lock(record_->mutex);
  return static_cast<std::size_t>(std::count(record_->sizes.begin(), record_->sizes.end(), bytes));
}

std::size_t AllocationTrace::largest_bytes() const {
  const std::lock_guard lock(record_->mutex);
  return record_->sizes.empty() ? 0 : *std::max_element(record_->sizes.begin(), record_->sizes.end());
}

std::size_t AllocationTrace::total_bytes() const {
  const std::lock_guard lock(record_->mutex);
  return std::accumulate(record_->sizes.begin(), record_->sizes.end(), std::size_t{0});
}

}  // namespace waybill
