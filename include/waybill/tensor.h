// SPDX-License-Identifier: Apache-2.0
// Memory: a Buffer owns bytes, a Tensor owns a shaped buffer, a TensorView points at memory that somebody else owns.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "waybill/dtype.h"
#include "waybill/error.h"

namespace waybill {

enum class DeviceType : std::uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};
WB_API std::string to_string(Device device);

// A view of at most 4 dimensions. Strides count elements. A null view (`!view`) stands for "not given".
struct WB_API TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};
  Device device{};

  TensorView() = default;
  // A contiguous view.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  template <class T>
  static TensorView of(T* data, std::initializer_list<std::int64_t> shape) {
    using Element = std::remove_const_t<T>;
    return TensorView(const_cast<Element*>(data), DTypeOf<Element>::value, shape);
  }

  // True where the view was given at all; an empty tensor ([0, H]) is given even if its pointer is null.
  explicit operator bool() const { return rank > 0; }
  std::int64_t size() const;  // elements
  bool is_contiguous() const;
  TensorView rows(std::int64_t begin, std::int64_t end) const;  // slice of dimension 0
  std::string describe() const;                                 // "f32 [8, 64] on cpu", for error messages

  // The pointer, after a check that T is the element type.
  template <class T>
  T* as() const {
    using Element = std::remove_const_t<T>;
    WB_CHECK(dtype == DTypeOf<Element>::value, "expected a {} tensor, got {}", to_string(DTypeOf<Element>::value), describe());
    return static_cast<T*>(data);
  }
};

// Owner of bytes, 64-byte aligned. Copying would hide an allocation and a copy, so it is deleted.
class WB_API Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes, Device device = {});  // not initialised; kOutOfMemory with the size on failure
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_{};
};

// Owner of a contiguous tensor.
class WB_API Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});  // not initialised
  static Tensor zeros(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  explicit operator bool() const { return static_cast<bool>(view_); }
  std::int64_t size() const { return view_.size(); }
  std::int64_t dim(int axis) const { return view_.shape[static_cast<std::size_t>(axis)]; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }
  // Makes the tensor hold `shape`; reuses the memory when it is large enough (contents are then undefined).
  void resize(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});
  void fill_zero();

 private:
  Buffer buffer_;
  TensorView view_;
};

// Records every Buffer allocation of the process between construction and destruction (tests: "nothing [T, E] exists").
class WB_API AllocationTrace {
 public:
  AllocationTrace();
  ~AllocationTrace();
  AllocationTrace(const AllocationTrace&) = delete;
  AllocationTrace& operator=(const AllocationTrace&) = delete;
  std::size_t count() const;                      // allocations
  std::size_t count_of(std::size_t bytes) const;  // allocations of exactly this size
  std::size_t largest_bytes() const;
  std::size_t total_bytes() const;

 private:
  struct Record;
  std::unique_ptr<Record> record_;
};

}  // namespace waybill
