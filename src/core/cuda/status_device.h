// SPDX-License-Identifier: Apache-2.0
// The sticky status word in device memory: kernels add to it, the host reads it once per step.
#pragma once

#include "core/cuda/device_buffer.h"
#include "waybill/status.h"

namespace waybill::cuda {

class DeviceStatus {
 public:
  explicit DeviceStatus(int device = 0);

  StatusWord* device_ptr() const { return memory_.as<StatusWord>(); }
  void clear(cudaStream_t stream) const;       // queued
  StatusWord read(cudaStream_t stream) const;  // waits for the stream

 private:
  DeviceBuffer memory_;
};

}  // namespace waybill::cuda
