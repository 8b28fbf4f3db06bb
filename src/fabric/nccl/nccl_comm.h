// SPDX-License-Identifier: Apache-2.0
// A communicator that one thread uses while another may have to take it away: calls of NCCL that queue messages, and the abort of a group that has lost a
// rank, exclude each other.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

namespace waybill::cuda {

class NcclComm {
 public:
  NcclComm() = default;
  explicit NcclComm(ncclComm_t comm) : comm_(comm) {}
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;
  // Before any other thread has it. Not owned.
  void set(ncclComm_t comm) { comm_.store(comm); }

  // While one lives, no other thread uses the communicator. get() is null once it has been taken away.
  class Use {
   public:
    ncclComm_t get() const { return comm_; }

   private:
    friend class NcclComm;
    Use(std::unique_lock<std::mutex> lock, ncclComm_t comm) : lock_(std::move(lock)), comm_(comm) {}
    std::unique_lock<std::mutex> lock_;
    ncclComm_t comm_;
  };
  Use use() const {
    std::unique_lock lock(mutex_);
    return {std::move(lock), comm_.load()};
  }
  // Null also while another thread uses it.
  Use try_use() const {
    std::unique_lock lock(mutex_, std::try_to_lock);
    const ncclComm_t comm = lock.owns_lock() ? comm_.load() : nullptr;
    return {std::move(lock), comm};
  }
  bool is_taken() const { return comm_.load() == nullptr; }

  // Takes it away, once: uses that follow find null. Waits for a use under way, but no longer than `patience`: that call may itself wait for what an abort
  // ends (a launch queue that kernels of a lost rank fill).
  ncclComm_t take(std::chrono::nanoseconds patience) {
    std::unique_lock lock(mutex_, std::defer_lock);
    for (const auto end = std::chrono::steady_clock::now() + patience; !lock.try_lock() && std::chrono::steady_clock::now() < end;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return comm_.exchange(nullptr);
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<ncclComm_t> comm_{nullptr};
};

}  // namespace waybill::cuda
