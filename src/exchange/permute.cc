// SPDX-License-Identifier: Apache-2.0
// The receiver's local steps. Each output row is written by one call of its own sum, so threads cannot change a result.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "exchange/impl.h"
#include "exchange/tuning_table.h"

namespace waybill {
namespace {

constexpr std::int64_t kLanes = 16;

// Runs body with a null pointer of the element type.
template <class Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kF32)
    body(static_cast<float*>(nullptr));
  else
    body(static_cast<bf16*>(nullptr));
}

template <class T>
T* typed_row(const TensorView& view, std::int64_t row) {
  return reinterpret_cast<T*>(row_pointer(view, row));
}

template <bool kFirst, class T>
void accumulate(float* sum, const T* y, float weight, bool weighted, std::int64_t H) {
  for (std::int64_t h = 0; h < H; ++h) {
    const float value = weighted ? weight * static_cast<float>(y[h]) : static_cast<float>(y[h]);
    sum[h] = kFirst ? value : sum[h] + value;
  }
}

// Fixed order: kLanes interleaved partial sums, then a tree.
template <class T>
float dot(const T* y, const float* z, std::int64_t H) {
  float lanes[kLanes] = {};
  std::int64_t h = 0;
  for (; h + kLanes <= H; h += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] += static_cast<float>(y[h + i]) * z[h + i];
  }
  for (std::int64_t i = 0; h + i < H; ++i) lanes[i] += static_cast<float>(y[h + i]) * z[h + i];
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace

void permute(const ReceiveLayout& layout, const TensorView& rows, const TensorView& y, Stream stream) {
  const std::int64_t H = rows.shape[1];
  check_rows("permute: rows", rows, layout.R(), H);
  check_rows("permute: y", y, layout.S_padded(), H);
  WB_CHECK(rows.dtype == y.dtype, "permute: rows are {}, y is {}", to_string(rows.dtype), to_string(y.dtype));
  const std::size_t row_bytes = static_cast<std::size_t>(H) * size_bytes(y.dtype);
  parallel_for(stream.pool, layout.S_padded(), cpu_tuning().permute_rows, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      const std::int32_t row = layout.slot_row[static_cast<std::size_t>(s)];
      if (row < 0)
        std::memset(row_pointer(y, s), 0, row_bytes);
      else
        std::memcpy(row_pointer(y, s), row_pointer(rows, row), row_bytes);
    }
  });
}

void unpermute_reduce(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& z, Stream stream) {
  const std::int64_t H = z.shape[1];
  check_rows("unpermute_reduce: y", y, layout.S_padded(), H);
  check_rows("unpermute_reduce: z", z, layout.R(), H);
  WB_CHECK(z.dtype == DType::kF32, "unpermute_reduce: z must be f32, got {}", z.describe());
  with_type(y.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(stream.pool, layout.R(), cpu_tuning().permute_rows, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t r = first; r < last; ++r) {
        float* sum = typed_row<float>(z, r);
        const std::int64_t begin = layout.row_slot_offsets[static_cast<std::size_t>(r)], end = layout.row_slot_offsets[static_cast<std::size_t>(r) + 1];
        if (begin == end) std::fill(sum, sum + H, 0.0f);
        for (std::int64_t j = begin; j < end; ++j) {
          const std::int64_t slot = layout.slot_position[static_cast<std::size_t>(j)];
          const float weight = layout.slot_weight[static_cast<std::size_t>(slot)];
          if (j == begin)
            accumulate<true>(sum, typed_row<T>(y, slot), weight, weighted, H);
          else
            accumulate<false>(sum, typed_row<T>(y, slot), weight, weighted, H);
        }
      }
    });
  });
}

void unpermute_reduce_backward(const ReceiveLayout& layout, const TensorView& y, bool weighted, const TensorView& dz, const TensorView& dy, float* d_weight,
                               Stream stream) {
  const std::int64_t H = dz.shape[1];
  check_rows("unpermute_reduce_backward: dz", dz, layout.R(), H);
  check_rows("unpermute_reduce_backward: dy", dy, layout.S_padded(), H);
  WB_CHECK(dz.dtype == DType::kF32, "unpermute_reduce_backward: dz must be f32, got {}", dz.describe());
  if (d_weight != nullptr) check_rows("unpermute_reduce_backward: y", y, layout.S_padded(), H);
  const auto for_slots = [&](const auto& body) {
    parallel_for(stream.pool, layout.S_padded(), cpu_tuning().permute_rows, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t s = first; s < last; ++s) body(s, layout.slot_row[static_cast<std::size_t>(s)]);
    });
  };
  // d_weight first: dy may share memory with y.
  if (d_weight != nullptr) {
    with_type(y.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      for_slots([&](std::int64_t s, std::int32_t row) { d_weight[s] = row < 0 ? 0.0f : dot(typed_row<T>(y, s), typed_row<float>(dz, row), H); });
    });
  }
  with_type(dy.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_slots([&](std::int64_t s, std::int32_t row) {
      T* target = typed_row<T>(dy, s);
      const float weight = weighted ? layout.slot_weight[static_cast<std::size_t>(s)] : 1.0f;
      const float* source = row < 0 ? nullptr : typed_row<float>(dz, row);
      for (std::int64_t h = 0; h < H; ++h) target[h] = source == nullptr ? T(0.0f) : T(weight * source[h]);
    });
  });
}

}  // namespace waybill
