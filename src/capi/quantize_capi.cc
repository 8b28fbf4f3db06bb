// SPDX-License-Identifier: Apache-2.0
// Low-precision formats.
#include "convert.h"
#include "waybill/quantize_activated.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

wb_quant_config default_quant_config() {
  const QuantConfig defaults = mxfp8_rows();
  wb_quant_config config{};
  config.element = static_cast<std::int32_t>(defaults.element);
  config.scale = static_cast<std::int32_t>(defaults.scale);
  config.rule = static_cast<std::int32_t>(defaults.rule);
  config.block_rows = defaults.block_rows;
  config.block_columns = defaults.block_columns;
  return config;
}

wb_activated_rows default_activated_rows() {
  const ActivationConfig defaults;
  wb_activated_rows rows{};
  rows.activation = static_cast<std::int32_t>(defaults.kind);
  rows.activation_limit = defaults.limit, rows.activation_alpha = defaults.alpha;
  return rows;
}

QuantConfig to_quant_config(const wb_quant_config* config) {
  const wb_quant_config given = read_struct(config, "config", default_quant_config());
  QuantConfig result;
  result.element = checked_enum(given.element, ElementFormat::kE2M1, "element");
  result.scale = checked_enum(given.scale, ScaleFormat::kE4M3, "scale");
  result.rule = checked_enum(given.rule, ScaleRule::kFloor, "rule");
  result.block_rows = given.block_rows;
  result.block_columns = given.block_columns;
  result.stochastic = given.stochastic != 0;
  result.seed = given.seed;
  validate(result);
  return result;
}

QuantizedView to_quantized(const wb_quantized* quantized, const char* name) {
  const wb_quantized given = read_struct(quantized, name);
  return {to_view(&given.codes, "codes", Memory::kAny), to_view(&given.scales, "scales", Memory::kAny),
          to_view(given.group_scales, "group_scales", Memory::kAny)};
}

TensorView optional_view(const wb_tensor* tensor, const char* name) { return tensor == nullptr ? TensorView{} : to_view(*tensor, name, Memory::kAny); }

}  // namespace

wb_status wb_quant_config_init(wb_quant_config* config, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(config, struct_size, default_quant_config(), "config"); });
}

wb_status wb_activated_rows_init(wb_activated_rows* rows, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(rows, struct_size, default_activated_rows(), "rows"); });
}

wb_status wb_quantize(const wb_quant_config* config, const wb_tensor* x, const wb_tensor* offsets, const wb_quantized* out, const wb_stream* stream) noexcept {
  return guarded([&] {
    const TensorView view = to_view(x, "x", Memory::kAny);
    quantize(to_quant_config(config), view, optional_view(offsets, "offsets"), to_quantized(out, "out"), stream_on(stream, view.device, "x"));
  });
}

wb_status wb_quantize_activated(const wb_quant_config* config, const wb_activated_rows* x, const wb_tensor* offsets, const wb_quantized* out,
                                const wb_stream* stream) noexcept {
  return guarded([&] {
    const wb_activated_rows given = read_struct(x, "x", default_activated_rows());
    ActivatedRows rows;
    rows.activation = {checked_enum(given.activation, Activation::kReluSquared, "activation"), given.activation_limit, given.activation_alpha};
    rows.h = to_view(&given.h, "h", Memory::kAny), rows.weight = to_view(given.weight, "weight", Memory::kAny);
    rows.da = to_view(given.da, "da", Memory::kAny), rows.d_weight = to_view(given.d_weight, "d_weight", Memory::kAny);
    rows.partial_sums = to_view(given.partial_sums, "partial_sums", Memory::kAny), rows.wide = to_view(given.wide, "wide", Memory::kAny);
    quantize_activated(to_quant_config(config), rows, optional_view(offsets, "offsets"), to_quantized(out, "out"), stream_on(stream, rows.h.device, "h"));
  });
}

wb_status wb_dequantize(const wb_quant_config* config, const wb_quantized* quantized, const wb_tensor* offsets, const wb_tensor* y,
                        const wb_stream* stream) noexcept {
  return guarded([&] {
    const TensorView view = to_view(y, "y", Memory::kAny);
    dequantize(to_quant_config(config), to_quantized(quantized, "quantized"), optional_view(offsets, "offsets"), view, stream_on(stream, view.device, "y"));
  });
}
