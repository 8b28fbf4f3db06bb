// SPDX-License-Identifier: Apache-2.0
// Where the CUDA products of quantised operands plug in, and how their operands are taken in parts that fit the workspace.
#pragma once

#include "ops/gemm/grouped_gemm_checks.h"
#include "waybill/quantized_gemm.h"

namespace waybill::detail {

// 8-bit matrix instructions take these formats: 8-bit elements under fp32 scales.
inline bool has_fp32_scales(const QuantConfig& c) {
  return c.element != ElementFormat::kE2M1 && (c.scale == ScaleFormat::kPowerOfTwo || c.scale == ScaleFormat::kF32);
}
inline bool has_blocks(const QuantConfig& c, std::int64_t rows, std::int64_t columns) { return c.block_rows == rows && c.block_columns == columns; }
inline bool is_fp8_product(const QuantConfig& rows, const QuantConfig& weights) {
  return has_fp32_scales(rows) && has_fp32_scales(weights) && has_blocks(rows, 1, 128) && has_blocks(weights, 128, 128);
}
inline bool is_fp8_wgrad(const QuantConfig& a, const QuantConfig& dy) {
  return has_fp32_scales(a) && has_fp32_scales(dy) && has_blocks(a, 128, 1) && has_blocks(dy, 128, 1);
}

// Rows [S, row_width] and weights [L, group_elements] as bf16, in row_parts x group_parts products whose parts fit the larger operand's copy, or in
// one product that widens both beside itself, whose counts are at progress_offset (widened_room.h).
struct WidePlan {
  std::int64_t row_parts = 1, group_parts = 1;
  std::int64_t part_rows = 0, part_groups = 0;
  std::size_t row_offset = 0, weight_offset = 0, offsets_offset = 0, firsts_offset = 0, progress_offset = 0, bytes = 0;
  // Elements of both copies together, from row_offset on.
  std::int64_t wide_elements() const { return static_cast<std::int64_t>(offsets_offset - row_offset) / 2; }
};
WidePlan plan_wide(std::int64_t S, std::int64_t row_width, std::int64_t L, std::int64_t group_elements);

// wgrad: columns of dy [S, N] and a [S, C] as bf16, in dy_parts x a_parts products whose parts fit the larger operand's copy. Parts of columns
// change no sum. step: the columns of a part are a multiple of it.
struct WideWgradPlan {
  std::int64_t dy_parts = 1, a_parts = 1;
  std::int64_t dy_columns = 0, a_columns = 0;
  std::size_t dy_offset = 0, a_offset = 0, bytes = 0;
};
WideWgradPlan plan_wide_wgrad(const GroupedShape& shape, std::int64_t step);
std::int64_t wgrad_step(const QuantizedWgradArgs& args, const GroupedShape& shape);

struct QuantizedBackend {
  void (*forward)(const QuantizedGemmArgs& args, const GroupedShape& shape, Stream stream);
  void (*dgrad)(const QuantizedDgradArgs& args, const GroupedShape& shape, Stream stream);
  void (*wgrad)(const QuantizedWgradArgs& args, const GroupedShape& shape, Stream stream);
};
extern const QuantizedBackend* g_quantized_backend;

}  // namespace waybill::detail
