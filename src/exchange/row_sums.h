// SPDX-License-Identifier: Apache-2.0
// Sums of rows in fixed order, shared by the flat and the two-level combine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "exchange/impl.h"
#include "exchange/tuning_table.h"

namespace waybill {

// sum = values, or sum += values; fp32 or bf16.
template <bool kFirst, class T>
void add_row(const T* values, std::int64_t H, float* sum) {
  for (std::int64_t h = 0; h < H; ++h) sum[h] = kFirst ? static_cast<float>(values[h]) : sum[h] + static_cast<float>(values[h]);
}

// out [rows, H]: add(index, is_first, sum) for every index of a row's list, in its order. A sum starts with its first part, so that
// it is exact where there is only one; a row with an empty list is 0.
template <class Add>
void sum_lists(const std::vector<std::int64_t>& offsets, const std::vector<std::int32_t>& list, const TensorView& out, ThreadPool* pool, const Add& add) {
  const std::int64_t H = out.shape[1];
  const auto sum_list = [&](std::int64_t row, float* sum) {
    const std::int64_t begin = offsets[static_cast<std::size_t>(row)], end = offsets[static_cast<std::size_t>(row) + 1];
    if (begin == end) std::fill(sum, sum + H, 0.0f);
    for (std::int64_t i = begin; i < end; ++i) add(list[static_cast<std::size_t>(i)], i == begin, sum);
  };
  parallel_for(pool, out.shape[0], cpu_tuning().sum_tokens, [&](std::int64_t first, std::int64_t last) {
    if (out.dtype == DType::kF32) {
      for (std::int64_t row = first; row < last; ++row) sum_list(row, reinterpret_cast<float*>(row_pointer(out, row)));
      return;
    }
    std::vector<float> sum(static_cast<std::size_t>(H));
    for (std::int64_t row = first; row < last; ++row) {
      sum_list(row, sum.data());
      auto* target = reinterpret_cast<bf16*>(row_pointer(out, row));
      for (std::int64_t h = 0; h < H; ++h) target[h] = bf16(sum[static_cast<std::size_t>(h)]);
    }
  });
}

}  // namespace waybill
