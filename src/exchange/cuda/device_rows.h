// SPDX-License-Identifier: Apache-2.0
// The check of row tensors that the calls of DeviceExchange share.
#pragma once

#include "exchange/cuda/device_exchange.h"

namespace waybill::cuda {

inline void check_rows(const char* what, std::span<const DeviceRows> rows, int count, std::int64_t columns, std::size_t element) {
  WB_CHECK(rows.size() == static_cast<std::size_t>(count), "{}: {} ranks of this launch, got {} tensors", what, count, rows.size());
  for (const DeviceRows& r : rows) {
    const std::int64_t stride = r.stride == 0 ? columns : r.stride;
    WB_CHECK(stride >= columns && stride == (rows[0].stride == 0 ? columns : rows[0].stride),
             "{}: rows of {} elements need one stride of at least that on all ranks of the launch, got {}", what, columns, stride);
    WB_CHECK(static_cast<std::size_t>(stride) * element % 16 == 0 && reinterpret_cast<std::uintptr_t>(r.data) % 16 == 0,
             "{}: rows must start at multiples of 16 bytes, got address {} and {} bytes a row", what, r.data, static_cast<std::size_t>(stride) * element);
  }
}

inline void check_bases(std::span<const void* const> base, int count) {
  WB_CHECK(base.empty() || base.size() == static_cast<std::size_t>(count), "combine: {} ranks of this launch, got {} bases", count, base.size());
  for (const void* b : base) {
    WB_CHECK(reinterpret_cast<std::uintptr_t>(b) % 16 == 0, "combine: base must start at a multiple of 16 bytes, got address {}", b);
  }
}

}  // namespace waybill::cuda
