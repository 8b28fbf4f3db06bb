// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/device_buffer.h"

#include "core/alloc_trace.h"
#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

DeviceGuard::DeviceGuard(int device) {
  WB_TRY_CUDA(cudaGetDevice(&previous_));
  if (device != previous_) WB_TRY_CUDA(cudaSetDevice(device));
}

DeviceGuard::~DeviceGuard() { WB_TRY_CUDA_NOEXCEPT(cudaSetDevice(previous_)); }

DeviceBuffer::DeviceBuffer(std::size_t bytes, int device) : bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  const DeviceGuard guard(device);
  const cudaError_t error = cudaMalloc(&data_, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::size_t free_bytes = 0, total_bytes = 0;
    WB_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    WB_FAIL(ErrorCode::kOutOfMemory, "cannot allocate {} bytes on cuda:{}: {} of {} bytes are free", bytes, device, free_bytes, total_bytes);
  }
  WB_TRY_CUDA(error);
  waybill::detail::note_allocation(bytes);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaFree(data_));
}

void DeviceBuffer::fill(int byte, cudaStream_t stream) const {
  if (bytes_ > 0) WB_TRY_CUDA(cudaMemsetAsync(data_, byte, bytes_, stream));
}

void DeviceBuffer::upload(const void* host, std::size_t bytes, cudaStream_t stream) const {
  WB_CHECK(bytes <= bytes_, "cannot copy {} bytes into a buffer of {}", bytes, bytes_);
  if (bytes > 0) WB_TRY_CUDA(cudaMemcpyAsync(data_, host, bytes, cudaMemcpyHostToDevice, stream));
}

void DeviceBuffer::download(void* host, std::size_t bytes, cudaStream_t stream) const {
  WB_CHECK(bytes <= bytes_, "cannot copy {} bytes out of a buffer of {}", bytes, bytes_);
  if (bytes > 0) WB_TRY_CUDA(cudaMemcpyAsync(host, data_, bytes, cudaMemcpyDeviceToHost, stream));
}

CudaStream::CudaStream(int device) {
  const DeviceGuard guard(device);
  WB_TRY_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaStream::~CudaStream() { WB_TRY_CUDA_NOEXCEPT(cudaStreamDestroy(stream_)); }

void CudaStream::synchronize() const { WB_TRY_CUDA(cudaStreamSynchronize(stream_)); }

CudaEvent::CudaEvent(bool timing) { WB_TRY_CUDA(cudaEventCreateWithFlags(&event_, timing ? cudaEventDefault : cudaEventDisableTiming)); }

CudaEvent::~CudaEvent() { WB_TRY_CUDA_NOEXCEPT(cudaEventDestroy(event_)); }

void CudaEvent::record(cudaStream_t stream) const { WB_TRY_CUDA(cudaEventRecord(event_, stream)); }

void CudaEvent::wait_on(cudaStream_t stream) const { WB_TRY_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }

void CudaEvent::synchronize() const { WB_TRY_CUDA(cudaEventSynchronize(event_)); }

float CudaEvent::elapsed_us_since(const CudaEvent& start) const {
  float ms = 0;
  WB_TRY_CUDA(cudaEventElapsedTime(&ms, start.event_, event_));
  return ms * 1000.0f;
}

}  // namespace waybill::cuda
