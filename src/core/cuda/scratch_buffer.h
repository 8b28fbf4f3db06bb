// SPDX-License-Identifier: Apache-2.0
// Device memory that kernels of one stream share and that grows with the calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

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

// While one lives, what this thread captures is thrown away: no graph will hold the memory.
class Rehearsal {
 public:
  Rehearsal();
  ~Rehearsal();
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;
  static bool is_on();
};

// Its memory comes from a stream-ordered pool of the device and not from cudaMalloc: where GPUs of one process see each other's memory, cudaMalloc and cudaFree
// must map it for the peer too, and wait there for kernels that wait for the very step this memory is for.
class ScratchBuffer {
 public:
  ScratchBuffer() = default;
  ~ScratchBuffer();
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;

  // At least `bytes`, for work that is queued on `stream` next. New memory is all zeros where `zero` says so. Waits for no work of `stream`: earlier calls keep
  // the memory that they were queued with. Memory that a captured graph may hold is kept until the object goes. Throws kOutOfMemory with size, device and
  // free memory.
  void reserve(std::size_t bytes, bool zero, int device, cudaStream_t stream);
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<void*> retired_;
  bool is_captured_ = false;
};

}  // namespace waybill::cuda
