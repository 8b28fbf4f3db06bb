// SPDX-License-Identifier: Apache-2.0
// Scratch memory booked once and carved without allocation: sizes and pointers come from the same record.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "waybill/tensor.h"

namespace waybill {

// The booking: what an operation needs, by name.
class WB_API WorkspacePlan {
 public:
  static constexpr std::size_t kAlignment = 256;

  // Books `bytes` and returns the offset to use later. Names appear in memory reports.
  std::size_t book(std::string name, std::size_t bytes);
  std::size_t total_bytes() const { return total_; }

  struct Entry {
    std::string name;
    std::size_t offset;
    std::size_t bytes;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::size_t total_ = 0;
};

// The memory behind a plan.
class WB_API Workspace {
 public:
  Workspace() = default;
  Workspace(void* data, std::size_t bytes) : data_(static_cast<std::byte*>(data)), bytes_(bytes) {}

  std::size_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  template <class T>
  T* at(std::size_t offset, std::size_t count) const {
    WB_CHECK(offset + count * sizeof(T) <= bytes_, "workspace of {} bytes is too small: {} needed", bytes_, offset + count * sizeof(T));
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace waybill
