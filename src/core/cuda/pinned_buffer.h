// SPDX-License-Identifier: Apache-2.0
// Host memory that every GPU copies from and to, and writes and reads itself.
#pragma once

#include <cstring>
#include <utility>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(std::size_t bytes) : bytes_(bytes) {  // zeros
    if (bytes == 0) return;
    WB_TRY_CUDA(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable));
    std::memset(data_, 0, bytes);
  }
  ~PinnedBuffer() {
    if (data_ != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaFreeHost(data_));
  }
  PinnedBuffer(PinnedBuffer&& other) noexcept { swap(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  void* data() const { return data_; }
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(data_) + offset);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(PinnedBuffer& other) noexcept { std::swap(data_, other.data_), std::swap(bytes_, other.bytes_); }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace waybill::cuda
