// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/scratch_buffer.h"

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

RelaxedCapture::RelaxedCapture() { WB_TRY_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
RelaxedCapture::~RelaxedCapture() { WB_TRY_CUDA_NOEXCEPT(cudaThreadExchangeStreamCaptureMode(&mode_)); }

void ScratchBuffer::reserve(std::size_t bytes, bool zero, int device, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (stream != nullptr) WB_TRY_CUDA(cudaStreamIsCapturing(stream, &status));
  const bool is_capturing = status != cudaStreamCaptureStatusNone;
  if (buffer_.bytes() < bytes) {
    const RelaxedCapture relaxed;
    if (is_captured_) {
      retired_.push_back(std::move(buffer_));
      is_captured_ = false;
    }
    if (!is_capturing && buffer_.bytes() > 0) WB_TRY_CUDA(cudaStreamSynchronize(stream));  // earlier calls use the old memory
    buffer_ = DeviceBuffer(bytes, device);
    if (zero) {  // now, not when a captured graph runs
      const CudaStream own(device);
      buffer_.fill(0, own);
      own.synchronize();
    }
  }
  is_captured_ = is_captured_ || is_capturing;
}

}  // namespace waybill::cuda
