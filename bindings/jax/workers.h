// SPDX-License-Identifier: Apache-2.0
// Threads for calls that wait for other devices. XLA's own threads are few and must not all wait: calls of several devices may come in any
// order. There are as many threads as calls in flight; an idle one serves the next call.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "ffi_support.h"

namespace waybill::jax {

class Workers {
 public:
  static Workers& instance() {
    static Workers* const workers = new Workers;  // never destroyed: work may be in flight when the process ends
    return *workers;
  }

  void run(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(work));
    if (waiting_.size() > idle_) std::thread([this] { serve(); }).detach();
    changed_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::size_t idle_ = 0;
};

inline void complete(ffi::Promise& promise, ffi::Error error) {
  if (error.success()) {
    promise.SetAvailable();
  } else {
    promise.SetError(std::move(error));
  }
}

// Runs `body` here when no other device takes part, else on a thread of its own. `body` owns what it needs: XLA's argument objects end with the
// handler, the arrays behind them live until the future is complete.
template <class Body>
ffi::Future launch(bool alone, Body body) {
  ffi::Promise promise;
  ffi::Future future(promise);
  if (alone) {
    complete(promise, body());
  } else {
    auto shared = std::make_shared<Body>(std::move(body));
    Workers::instance().run([promise, shared]() mutable { complete(promise, (*shared)()); });
  }
  return future;
}

}  // namespace waybill::jax
