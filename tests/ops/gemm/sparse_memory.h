// SPDX-License-Identifier: Apache-2.0
// Address space of which only a few pages are touched, for offsets beyond 2^31 at their full values.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace waybill::testing {

// Address space of `bytes` that reads as zeros.
class Sparse {
 public:
  explicit Sparse(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

}  // namespace waybill::testing
