// SPDX-License-Identifier: Apache-2.0
// Recipes and argument checks. The block loops are the reference ones: this op is the oracle of the GPU kernels.
#include "waybill/quantize.h"

#include "ops/quantize/quantize_ref.h"

namespace waybill {

QuantConfig mxfp8_rows(ElementFormat element, ScaleRule rule) { return {element, ScaleFormat::kE8M0, rule, 1, 32}; }
QuantConfig mxfp8_columns(ElementFormat element, ScaleRule rule) { return {element, ScaleFormat::kE8M0, rule, 32, 1}; }
QuantConfig fp8_rows(ScaleFormat scale) { return {ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 1, 128}; }
QuantConfig fp8_tiles(ScaleFormat scale) { return {ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 128, 128}; }
QuantConfig nvfp4_rows() { return {ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 1, 16}; }

void validate(const QuantConfig& config) {
  WB_CHECK(static_cast<int>(config.element) <= 2, "quantize: unknown element format {}", static_cast<int>(config.element));
  WB_CHECK(static_cast<int>(config.scale) <= 3, "quantize: unknown scale format {}", static_cast<int>(config.scale));
  WB_CHECK(static_cast<int>(config.rule) <= 1, "quantize: unknown scale rule {}", static_cast<int>(config.rule));
  WB_CHECK(config.block_rows >= 1 && config.block_columns >= 1, "quantize: a block must have rows and columns, got {} x {}", config.block_rows,
           config.block_columns);
}

void check_block_fit(const QuantConfig& config, const char* dimension, std::int64_t value) {
  const bool needs_whole_blocks = config.scale == ScaleFormat::kE8M0 || config.scale == ScaleFormat::kE4M3;
  const char* format = config.scale == ScaleFormat::kE4M3 ? "NVFP4" : "MXFP8";
  WB_CHECK(!needs_whole_blocks || value % config.block_columns == 0, "{} = {} does not fit {}: it must be a multiple of {} ({} mod {} = {})", dimension, value,
           format, config.block_columns, value, config.block_columns, value % config.block_columns);
  WB_CHECK(config.element != ElementFormat::kE2M1 || value % 2 == 0, "{} = {} does not fit 4-bit elements: it must be even", dimension, value);
}

std::vector<std::int64_t> block_row_offsets(const TensorView& offsets, std::int64_t block_rows) {
  WB_CHECK(offsets.rank == 1 && offsets.shape[0] >= 1, "offsets must be [L + 1], got {}", offsets.describe());
  WB_CHECK(block_rows >= 1, "a block must have rows, got {}", block_rows);
  const std::int32_t* values = offsets.as<std::int32_t>();
  std::vector<std::int64_t> first{0};
  for (std::int64_t g = 0; g + 1 < offsets.shape[0]; ++g) {
    WB_CHECK(values[g + 1] >= values[g], "offsets decrease at group {}: {} then {}", g, values[g], values[g + 1]);
    first.push_back(first.back() + (static_cast<std::int64_t>(values[g + 1]) - values[g] + block_rows - 1) / block_rows);
  }
  return first;
}

namespace {

void check_matrix(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns) {
  WB_CHECK(view.rank == 2 && view.shape[0] >= rows && view.shape[1] == columns, "quantize: {} must be [{}, {}], got {}", name, rows, columns, view.describe());
  WB_CHECK(view.device.type == DeviceType::kCpu, "quantize: {} is not on the cpu: {}", name, view.describe());
  WB_CHECK(columns <= 1 || view.stride[1] == 1, "quantize: the columns of {} must be adjacent, got stride {}", name, view.stride[1]);
  WB_CHECK(view.data != nullptr || view.size() == 0, "quantize: {} has no memory: {}", name, view.describe());
}

bool is_code_dtype(ElementFormat element, DType dtype) {
  return dtype == DType::kU8 || (element == ElementFormat::kE4M3 && dtype == DType::kF8E4M3) || (element == ElementFormat::kE5M2 && dtype == DType::kF8E5M2);
}

bool is_scale_dtype(ScaleFormat scale, DType dtype) {
  switch (scale) {
    case ScaleFormat::kE8M0:
      return dtype == DType::kU8;
    case ScaleFormat::kE4M3:
      return dtype == DType::kU8 || dtype == DType::kF8E4M3;
    case ScaleFormat::kPowerOfTwo:
    case ScaleFormat::kF32:
      break;
  }
  return dtype == DType::kF32;
}

void check(const QuantConfig& config, const TensorView& wide, const TensorView& offsets, const QuantizedView& q) {
  validate(config);
  WB_CHECK(wide.rank == 2, "quantize: the tensor must be [S, C], got {}", wide.describe());
  const std::int64_t S = wide.shape[0], C = wide.shape[1];
  check_matrix("the tensor", wide, S, C);
  WB_CHECK(wide.dtype == DType::kF32 || wide.dtype == DType::kBF16, "quantize: the tensor must be f32 or bf16, got {}", wide.describe());
  check_block_fit(config, "C (columns)", C);
  std::int64_t L = 1, block_rows = (S + config.block_rows - 1) / config.block_rows;
  if (offsets) {
    const std::vector<std::int64_t> first = block_row_offsets(offsets, config.block_rows);
    L = offsets.shape[0] - 1;
    block_rows = first.back();
    const std::int32_t* values = offsets.as<std::int32_t>();
    WB_CHECK(values[0] == 0, "quantize: offsets[0] must be 0, got {}", values[0]);
    WB_CHECK(values[L] <= S, "quantize: offsets[{}] = {} exceeds the {} rows", L, values[L], S);
  }
  check_matrix("codes", q.codes, offsets ? offsets.as<std::int32_t>()[L] : S, config.element == ElementFormat::kE2M1 ? C / 2 : C);
  WB_CHECK(is_code_dtype(config.element, q.codes.dtype), "quantize: codes have the wrong type: {}", q.codes.describe());
  check_matrix("scales", q.scales, block_rows, (C + config.block_columns - 1) / config.block_columns);
  WB_CHECK(is_scale_dtype(config.scale, q.scales.dtype), "quantize: scales have the wrong type: {}", q.scales.describe());
  if (config.scale == ScaleFormat::kE4M3) {
    WB_CHECK(q.group_scales.rank == 1 && q.group_scales.shape[0] == L && q.group_scales.dtype == DType::kF32, "quantize: group_scales must be f32 [{}], got {}",
             L, q.group_scales.describe());
  }
}

}  // namespace

void quantize(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, Stream stream) {
  check(config, x, offsets, out);
  quantize_ref(config, x, offsets, out, stream.pool);
}

void dequantize(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream) {
  check(config, y, offsets, q);
  dequantize_ref(config, q, offsets, y, stream.pool);
}

}  // namespace waybill
