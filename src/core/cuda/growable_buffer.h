// SPDX-License-Identifier: Apache-2.0
// Device memory that grows in place: addresses for the most it may hold are reserved at once, memory is mapped as it is asked for.
#pragma once

#include <cstddef>
#include <utility>

namespace waybill::cuda {

// Growing keeps address and contents, waits for no work and maps nothing on other GPUs (cudaMalloc does where GPUs see each other's memory, and waits
// there for kernels that may wait for the caller). Memory comes in pieces of granularity(), 2 MiB on GPUs so far. Not to be called inside of a capture.
class GrowableBuffer {
 public:
  GrowableBuffer() = default;
  GrowableBuffer(std::size_t most_bytes, int device);
  ~GrowableBuffer();
  GrowableBuffer(GrowableBuffer&& other) noexcept { swap(other); }
  GrowableBuffer& operator=(GrowableBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  // At least `bytes`, at most the most. Throws kOutOfMemory with size, device and free memory.
  void grow(std::size_t bytes);
  void* data() const { return reinterpret_cast<void*>(address_); }
  std::size_t bytes() const { return mapped_; }
  static std::size_t granularity(int device);

 private:
  void swap(GrowableBuffer& other) noexcept {
    std::swap(address_, other.address_), std::swap(reserved_, other.reserved_), std::swap(mapped_, other.mapped_), std::swap(device_, other.device_);
  }
  unsigned long long address_ = 0;
  std::size_t reserved_ = 0, mapped_ = 0;
  int device_ = 0;
};

}  // namespace waybill::cuda
