// SPDX-License-Identifier: Apache-2.0
// A non-blocking stream of the device's highest priority: its CTAs get SMs that become free before those of other streams do. Graphs keep the priority.
#pragma once

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"

namespace waybill::cuda {

class UrgentStream {
 public:
  explicit UrgentStream(int device) {
    const DeviceGuard guard(device);
    int least = 0, greatest = 0;
    WB_TRY_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    WB_TRY_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  }
  ~UrgentStream() { WB_TRY_CUDA_NOEXCEPT(cudaStreamDestroy(stream_)); }
  UrgentStream(const UrgentStream&) = delete;
  UrgentStream& operator=(const UrgentStream&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace waybill::cuda
