// SPDX-License-Identifier: Apache-2.0
// Calls that wait for other processes without a timeout of their own (NCCL's start, the device's end), with one.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace waybill::cuda {

// Runs `call` on a thread of its own and waits for its end: false where it took longer than `timeout`; the thread then goes on, so that `call` owns
// what it touches. An exception of `call` is passed on. The thread starts without a current device.
template <class Call>
bool ends_within(std::chrono::nanoseconds timeout, Call call) {
  std::packaged_task<void()> task(std::move(call));
  std::future<void> end = task.get_future();
  std::thread(std::move(task)).detach();
  if (end.wait_for(timeout) != std::future_status::ready) return false;
  end.get();
  return true;
}

}  // namespace waybill::cuda
