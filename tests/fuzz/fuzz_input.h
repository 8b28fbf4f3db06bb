// SPDX-License-Identifier: Apache-2.0
// Reads values from a fuzzer's bytes; where they end, zeros follow, so that every input is a complete one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

namespace waybill::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  template <class T>
  T take() {
    T value{};
    const std::size_t bytes = sizeof(T) < size_ ? sizeof(T) : size_;
    if (bytes > 0) std::memcpy(&value, data_, bytes);
    skip(bytes);
    return value;
  }
  // One of `count` cases, by one byte.
  int pick(int count) { return take<std::uint8_t>() % count; }
  template <class T, std::size_t N>
  T pick(const T (&list)[N]) {
    return list[take<std::uint8_t>() % N];
  }
  std::string rest() {
    std::string text(reinterpret_cast<const char*>(data_), size_);
    skip(size_);
    return text;
  }
  std::size_t size() const { return size_; }

 private:
  void skip(std::size_t bytes) {
    data_ += bytes;
    size_ -= bytes;
  }
  const std::uint8_t* data_;
  std::size_t size_;
};

}  // namespace waybill::fuzz
