// SPDX-License-Identifier: Apache-2.0
// What calls keep for a stream: one T a (device, stream), made empty at the first look-up and kept for the process.
//
// Only the look-up is locked. A T may then allocate and wait for its stream: a lock held meanwhile would keep the threads of other GPUs from queueing
// what that stream waits for (ranks in one process). Calls on a stream come from one thread at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

namespace waybill::cuda {

template <class T>
class StreamMap {
 public:
  T& at(int device, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    return all_[{device, stream}];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, cudaStream_t>, T> all_;  // its elements stay where they are
};

}  // namespace waybill::cuda
