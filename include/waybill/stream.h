// SPDX-License-Identifier: Apache-2.0
// Where an operation runs. On the CPU an operation has finished when the call returns; on a GPU it is queued on `native`.
#pragma once

#include "waybill/tensor.h"
#include "waybill/thread_pool.h"

namespace waybill {

struct Stream {
  Device device{};
  void* native = nullptr;      // cudaStream_t
  ThreadPool* pool = nullptr;  // CPU: threads to use; null = the calling thread only

  static Stream cpu(ThreadPool* pool = nullptr) { return Stream{Device{}, nullptr, pool}; }
};

}  // namespace waybill
