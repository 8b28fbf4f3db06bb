// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace waybill::mpi {

// What std::timed_mutex does. That one waits with pthread_mutex_clocklock, which the ThreadSanitizer of g++ 12 does not know: it would
// report the unlock of a mutex that nobody locked, and see no order between those who hold it.
class TimedMutex {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [this] { return !is_held_; });
    is_held_ = true;
  }

  template <class Rep, class Period>
  bool try_lock_for(std::chrono::duration<Rep, Period> patience) {
    std::unique_lock lock(mutex_);
    if (!freed_.wait_for(lock, patience, [this] { return !is_held_; })) return false;
    is_held_ = true;
    return true;
  }

  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      is_held_ = false;
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  bool is_held_ = false;
};

}  // namespace waybill::mpi
