// SPDX-License-Identifier: Apache-2.0
// Owners of GPU memory, pinned host memory, streams and events. Nothing here is called inside a step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "waybill/tensor.h"

namespace waybill::cuda {

// Makes `device` current and restores the former one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// cudaMalloc'ed bytes (plain memory, 256-byte aligned), not initialised. Throws kOutOfMemory with size, device and free memory.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes, int device = 0);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return Device{DeviceType::kCuda, device_}; }

  // All three are queued on `stream`; host memory must outlive the copy unless it is pageable (then the call waits).
  void fill(int byte, cudaStream_t stream = nullptr) const;
  void upload(const void* host, std::size_t bytes, cudaStream_t stream = nullptr) const;
  void download(void* host, std::size_t bytes, cudaStream_t stream = nullptr) const;

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
};

// A non-blocking stream (it does not wait for the legacy default stream).
class CudaStream {
 public:
  explicit CudaStream(int device = 0);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator cudaStream_t() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

class CudaEvent {
 public:
  explicit CudaEvent(bool timing = true);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  void wait_on(cudaStream_t stream) const;  // later work of `stream` waits for this event
  void synchronize() const;
  float elapsed_us_since(const CudaEvent& start) const;  // both must have completed

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace waybill::cuda
