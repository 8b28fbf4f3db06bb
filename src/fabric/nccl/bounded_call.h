// SPDX-License-Identifier: Apache-2.0
// Calls that wait for other processes without a timeout of their own (NCCL's start, the device's end), with one.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace waybill::cuda {

// Runs `call` on a thread of its own and waits for its end: false where it took longer than `timeout`, or stop() said so before; the thread then goes on, so
// that `call` owns what it touches. An exception of `call` is passed on. The thread starts without a current device.
template <class Call, class Stop>
bool ends_within(std::chrono::nanoseconds timeout, Call call, const Stop& stop) {
  std::packaged_task<void()> task(std::move(call));
  std::future<void> end = task.get_future();
  std::thread(std::move(task)).detach();
  const auto latest = std::chrono::steady_clock::now() + timeout;
  while (end.wait_for(std::chrono::milliseconds(2)) != std::future_status::ready) {
    if (stop() || std::chrono::steady_clock::now() > latest) return false;
  }
  end.get();
  return true;
}

template <class Call>
bool ends_within(std::chrono::nanoseconds timeout, Call call) {
  return ends_within(timeout, std::move(call), [] { return false; });
}

}  // namespace waybill::cuda
