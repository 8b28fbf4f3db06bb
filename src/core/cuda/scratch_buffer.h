// SPDX-License-Identifier: Apache-2.0
// Device memory that kernels of one stream share and that grows with the calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "core/cuda/device_buffer.h"

namespace waybill::cuda {

// While one lives, this thread may allocate although a stream of it is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class ScratchBuffer {
 public:
  // At least `bytes`, for work that is queued on `stream` next. New memory is all zeros where `zero` says so. Growing waits for the stream; inside of a
  // capture it does not, and memory that a graph may hold is kept until the object goes.
  void reserve(std::size_t bytes, bool zero, int device, cudaStream_t stream);
  void* data() const { return buffer_.data(); }
  template <class T>
  T* as() const {
    return buffer_.as<T>();
  }
  std::size_t bytes() const { return buffer_.bytes(); }

 private:
  DeviceBuffer buffer_;
  std::vector<DeviceBuffer> retired_;
  bool is_captured_ = false;
};

}  // namespace waybill::cuda
