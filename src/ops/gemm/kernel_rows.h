// SPDX-License-Identifier: Apache-2.0
// Row loops that every kernel set instantiates under its own target attribute; the compiler vectorises them.
#pragma once

#include <cstdint>
#include <cstring>

#include "waybill/dtype.h"

namespace waybill::detail {

#define WB_ROW_INLINE inline __attribute__((always_inline))

WB_ROW_INLINE float widen_bf16(std::uint16_t bits) {
  const std::uint32_t u = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

template <bool kBf16>
WB_ROW_INLINE void pack_columns_loop(const void* const* rows, int num_rows, std::int64_t byte, int width, int panel_width, float* panel) {
  for (int k = 0; k < num_rows; ++k, panel += panel_width) {
    const char* in = rows[k] == nullptr ? nullptr : static_cast<const char*>(rows[k]) + byte;
    for (int i = 0; i < panel_width; ++i) {
      if (in == nullptr || i >= width) {
        panel[i] = 0;
      } else {
        panel[i] = kBf16 ? widen_bf16(reinterpret_cast<const std::uint16_t*>(in)[i]) : reinterpret_cast<const float*>(in)[i];
      }
    }
  }
}

WB_ROW_INLINE void finish_f32_loop(const float* __restrict acc, const float* __restrict bias, std::int64_t width, bool accumulate, void* out_row) {
  float* __restrict out = static_cast<float*>(out_row);
  if (bias == nullptr && accumulate) {
    for (std::int64_t i = 0; i < width; ++i) out[i] += acc[i];
  } else if (bias == nullptr) {
    for (std::int64_t i = 0; i < width; ++i) out[i] = acc[i];
  } else if (accumulate) {
    for (std::int64_t i = 0; i < width; ++i) out[i] += acc[i] + bias[i];
  } else {
    for (std::int64_t i = 0; i < width; ++i) out[i] = acc[i] + bias[i];
  }
}

// bf16 results are stored, never accumulated.
WB_ROW_INLINE void finish_bf16_loop(const float* __restrict acc, const float* __restrict bias, std::int64_t width, void* out_row) {
  std::uint16_t* __restrict out = static_cast<std::uint16_t*>(out_row);
  if (bias == nullptr) {
    for (std::int64_t i = 0; i < width; ++i) out[i] = bf16::from_float(acc[i]);
  } else {
    for (std::int64_t i = 0; i < width; ++i) out[i] = bf16::from_float(acc[i] + bias[i]);
  }
}

}  // namespace waybill::detail
