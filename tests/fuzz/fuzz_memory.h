// SPDX-License-Identifier: Apache-2.0
// Memory for C structs that a fuzzer fills: as many bytes as shape and strides name, not one more, so that a sanitizer sees the first
// one too far. Sizes beyond 64 KB get no memory: a caller whose pointer lies cannot be caught.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz_input.h"
#include "waybill/waybill.h"

namespace waybill::fuzz {

constexpr __int128 kMaxBytes = 1 << 16;

class Memory {
 public:
  // Null for sizes below 1 or beyond the limit. The bytes repeat the input's next eight.
  template <class T = float>
  T* array(Input& input, __int128 count, int element_bytes = sizeof(T)) {
    if (count < 1 || count > kMaxBytes) return nullptr;
    const __int128 bytes = count * element_bytes;
    if (bytes > kMaxBytes) return nullptr;
    blocks_.emplace_back(static_cast<char*>(std::malloc(static_cast<std::size_t>(bytes))), std::free);
    char* data = blocks_.back().get();
    const auto pattern = input.take<std::uint64_t>();
    for (std::size_t i = 0; i < static_cast<std::size_t>(bytes); ++i) data[i] = reinterpret_cast<const char*>(&pattern)[i % 8];
    return reinterpret_cast<T*>(data);
  }

  // Moderate numbers: real work instead of NaN everywhere.
  float* floats(Input& input, __int128 count) {
    float* data = array<float>(input, count);
    const int seed = data != nullptr ? input.take<std::uint8_t>() : 0;
    if (seed < 8) return data;  // now and then the raw bytes: NaN, Inf, denormals
    for (__int128 i = 0; i < count; ++i) data[i] = static_cast<float>((static_cast<int>(i) * 7 + seed) % 23 - 11) * 0.125f;
    return data;
  }

  // A tensor that mostly is what the call needs; one byte of the input in eight bends type, rank, shape, strides or device.
  wb_tensor tensor(Input& input, std::int32_t dtype, std::initializer_list<std::int64_t> shape) {
    wb_tensor t{};
    t.dtype = dtype;
    t.rank = static_cast<std::int32_t>(shape.size());
    std::size_t axis = 0;
    for (const std::int64_t n : shape) t.shape[axis++] = n;
    bend(input, t);
    const __int128 count = t.rank > 0 ? extent(t) : 0;
    t.data = dtype == WB_F32 && t.dtype == WB_F32 ? static_cast<void*>(floats(input, count)) : array<char>(input, count, element_bytes(t.dtype));
    return t;
  }

  static int element_bytes(std::int32_t dtype) {
    switch (dtype) {
      case WB_F32:
      case WB_I32:
        return 4;
      case WB_I64:
      case WB_F64:
        return 8;
      case WB_BF16:
      case WB_F16:
      case WB_I16:
      case WB_U16:
        return 2;
      default:
        return 1;
    }
  }

 private:
  static void bend(Input& input, wb_tensor& t) {
    static const std::int64_t odd[] = {0, 1, 2, 3, 5, 8, 17, -1, 1 << 20, INT32_MAX, std::int64_t{1} << 40, INT64_MAX, INT64_MIN};
    const int change = input.take<std::uint8_t>();
    if (change < 224) return;
    switch (change % 6) {
      case 0:
        t.dtype = input.take<std::int8_t>();
        break;
      case 1:
        t.rank = input.take<std::int8_t>();
        break;
      case 2:
        t.shape[input.pick(4)] = input.pick(odd);
        break;
      case 3:
        t.stride[input.pick(4)] = input.pick(odd);
        break;
      case 4:
        t.device_type = input.take<std::int8_t>();
        break;
      default:
        for (std::int64_t& stride : t.stride) stride = input.take<std::int8_t>();
    }
  }

  // Elements from the first to the last that shape and strides reach; -1 where that is no memory anyone has.
  static __int128 extent(const wb_tensor& t) {
    if (t.rank < 0 || t.rank > 4) return -1;
    __int128 last = 0, dense = 1;
    bool has_stride = false;
    for (int i = 0; i < t.rank; ++i) has_stride = has_stride || t.stride[i] != 0;
    for (int i = t.rank - 1; i >= 0; --i) {
      if (t.shape[i] <= 0) return 0;
      const __int128 stride = has_stride ? t.stride[i] : dense;
      if (stride < 0) return -1;
      last += (static_cast<__int128>(t.shape[i]) - 1) * stride;
      dense *= t.shape[i];
      if (last > kMaxBytes || dense > kMaxBytes) return -1;
    }
    return last + 1;
  }

  std::vector<std::unique_ptr<char, void (*)(void*)>> blocks_;
};

}  // namespace waybill::fuzz
