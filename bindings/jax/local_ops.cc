// SPDX-License-Identifier: Apache-2.0
// Ops of one device: router, grouped matmul, block formats.
#include "ffi_support.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::Result<ffi::Buffer<ffi::F32>>;
using I32Result = ffi::Result<ffi::Buffer<ffi::S32>>;

// Optional operands have zero elements where they are not given: bias [0], padding_mask [0].
wb_router_inputs router_inputs(const Any& logits, const Any& bias, const Any& mask) {
  wb_router_inputs inputs{};
  inputs.struct_size = sizeof(inputs);
  inputs.logits = to_tensor(logits);
  if (bias.element_count() > 0) inputs.expert_bias = to_tensor(bias);
  if (mask.element_count() > 0) inputs.padding_mask = to_tensor(mask);
  return inputs;
}

ffi::Error router_forward(Any logits, Any bias, Any mask, AnyResult ids, F32Result weights, I32Result counts, Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  const wb_router_inputs inputs = router_inputs(logits, bias, mask);
  wb_router_outputs outputs{};
  outputs.struct_size = sizeof(outputs);
  outputs.route = to_route(config.E, *ids, *weights, data_of<std::int32_t>(*counts));
  return to_error(wb_router_forward(&config, &inputs, &outputs, nullptr));
}

// totals [2]: valid tokens the counts cover, valid tokens the losses are averaged over.
void add_totals(wb_router_inputs& inputs, const Any& counts, const F32& totals) {
  inputs.aux_counts = data_of<std::int32_t>(counts);
  inputs.aux_tokens = data_of<float>(totals)[0];
  inputs.loss_tokens = data_of<float>(totals)[1];
}

ffi::Error router_losses(Any logits, Any bias, Any mask, Any ids, F32 weights, Any counts, F32 totals, F32Result losses, Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  wb_router_inputs inputs = router_inputs(logits, bias, mask);
  add_totals(inputs, counts, totals);
  const wb_route route = to_route(config.E, ids, weights);
  double values[3] = {};
  WB_FFI_TRY(wb_router_losses(&config, &inputs, &route, values, nullptr));
  for (int i = 0; i < 3; ++i) data_of<float>(*losses)[i] = static_cast<float>(values[i]);
  return ffi::Error::Success();
}

ffi::Error router_backward(Any logits, Any bias, Any mask, Any ids, F32 weights, Any counts, F32 totals, F32 d_weights, F32 d_losses, F32Result d_logits,
                           Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  config.aux_coefficient *= data_of<float>(d_losses)[0];
  config.sequence_coefficient *= data_of<float>(d_losses)[1];
  config.z_coefficient *= data_of<float>(d_losses)[2];
  wb_router_inputs inputs = router_inputs(logits, bias, mask);
  add_totals(inputs, counts, totals);
  const wb_route route = to_route(config.E, ids, weights);
  const wb_tensor result = to_tensor(*d_logits);
  return to_error(wb_router_backward(&config, &inputs, &route, data_of<float>(d_weights), 1.0f, &result, nullptr));
}

// offsets of the groups from their sizes; sizes that are negative or pass the rows are refused.
ffi::Error to_offsets(const Any& sizes, std::int64_t rows, std::vector<std::int32_t>& offsets) {
  const std::int32_t* values = data_of<std::int32_t>(sizes);
  std::int64_t sum = 0;
  offsets.assign(1, 0);
  for (std::size_t g = 0; g < sizes.element_count(); ++g) {
    if (values[g] < 0 || (sum += values[g]) > rows) {
      return refuse("group_sizes[" + std::to_string(g) + "] = " + std::to_string(values[g]) + " is negative or passes the " + std::to_string(rows) + " rows");
    }
    offsets.push_back(static_cast<std::int32_t>(sum));
  }
  return ffi::Error::Success();
}

void zero_tail(const wb_tensor& rows, std::int32_t from) {
  const std::size_t row_bytes = static_cast<std::size_t>(rows.shape[1]) * (rows.dtype == WB_F32 ? 4 : 2);
  const auto begin = static_cast<std::size_t>(from), end = static_cast<std::size_t>(rows.shape[0]);
  if (end > begin && row_bytes > 0) std::memset(static_cast<char*>(rows.data) + begin * row_bytes, 0, (end - begin) * row_bytes);
}

// product: 0 forward (a, weights -> y), 1 dgrad (weights, dy -> da), 2 wgrad (a, dy -> d_weights).
ffi::Error grouped_matmul(Any first, Any second, Any sizes, AnyResult result, std::int64_t product, bool lcn) {
  wb_grouped_gemm_args args{};
  args.struct_size = sizeof(args);
  args.weights_are_lcn = lcn ? 1 : 0;
  const wb_tensor x = to_tensor(first), y = to_tensor(second), out = to_tensor(*result);
  const std::int64_t rows = product == 1 ? y.shape[0] : x.shape[0];
  std::vector<std::int32_t> offsets;
  if (ffi::Error error = to_offsets(sizes, rows, offsets); error.failure()) return error;
  args.offsets.data = offsets.data();
  args.offsets.dtype = WB_I32;
  args.offsets.rank = 1;
  args.offsets.shape[0] = static_cast<std::int64_t>(offsets.size());
  switch (product) {
    case 0:
      args.a = x;
      args.weights = y;
      args.y = out;
      WB_FFI_TRY(wb_grouped_gemm(&args, nullptr));
      break;
    case 1:
      args.weights = x;
      args.y = y;
      args.a = out;
      WB_FFI_TRY(wb_grouped_gemm_dgrad(&args, nullptr));
      break;
    default:
      args.a = x;
      args.y = y;
      args.weights = out;
      return to_error(wb_grouped_gemm_wgrad(&args, nullptr));
  }
  zero_tail(out, offsets.back());
  return ffi::Error::Success();
}

wb_quantized quantized(const wb_tensor& codes, const wb_tensor& scales) {
  wb_quantized result{};
  result.struct_size = sizeof(result);
  result.codes = codes;
  result.scales = scales;
  return result;
}

ffi::Error quantize(Any x, AnyResult codes, AnyResult scales, Bytes bytes) {
  wb_quant_config config{};
  if (!read_config(bytes, config)) return refuse("the format's config has another size");
  const wb_tensor from = to_tensor(x);
  const wb_quantized out = quantized(to_tensor(*codes), to_tensor(*scales));
  return to_error(wb_quantize(&config, &from, nullptr, &out, nullptr));
}

ffi::Error dequantize(Any codes, Any scales, AnyResult y, Bytes bytes) {
  wb_quant_config config{};
  if (!read_config(bytes, config)) return refuse("the format's config has another size");
  const wb_quantized from = quantized(to_tensor(codes), to_tensor(scales));
  const wb_tensor to = to_tensor(*y);
  return to_error(wb_dequantize(&config, &from, nullptr, &to, nullptr));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_router_forward, router_forward,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Ret<F32>().Ret<ffi::Buffer<ffi::S32>>().Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_router_losses, router_losses,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<Any>().Arg<F32>().Ret<F32>().Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wbx_router_backward, router_backward,
    ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<Any>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_grouped_matmul, grouped_matmul,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Attr<std::int64_t>("product").Attr<bool>("lcn"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_quantize, quantize, ffi::Ffi::Bind().Arg<Any>().Ret<Any>().Ret<Any>().Attr<Bytes>("config"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_dequantize, dequantize, ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Ret<Any>().Attr<Bytes>("config"));

}  // namespace waybill::jax
