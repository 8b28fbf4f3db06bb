// SPDX-License-Identifier: Apache-2.0
// Ops of one device: router, grouped matmul, block formats. Each is written once and bound twice: for the CPU, and for CUDA (wbx_*_cuda), where it queues
// on XLA's stream, waits for nothing and may become part of a command buffer.
#include "ffi_support.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::Result<ffi::Buffer<ffi::F32>>;
using I32Result = ffi::Result<ffi::Buffer<ffi::S32>>;

template <auto kFunction>
struct On;
template <class... Args, ffi::Error (*kFunction)(const Place&, Args...)>
struct On<kFunction> {
  static ffi::Error cpu(Args... args) { return kFunction(Place(), args...); }
  static ffi::Error cuda(void* stream, std::int32_t device, Args... args) { return kFunction(Place(device, stream), args...); }
};

// Optional operands have zero elements where they are not given: bias [0], padding_mask [0].
wb_router_inputs router_inputs(const Place& at, const Any& logits, const Any& bias, const Any& mask) {
  wb_router_inputs inputs{};
  inputs.struct_size = sizeof(inputs);
  inputs.logits = to_tensor(logits, at);
  if (bias.element_count() > 0) inputs.expert_bias = to_tensor(bias, at);
  if (mask.element_count() > 0) inputs.padding_mask = to_tensor(mask, at);
  return inputs;
}

ffi::Error router_forward(const Place& at, Any logits, Any bias, Any mask, AnyResult ids, F32Result weights, I32Result counts, Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  const wb_router_inputs inputs = router_inputs(at, logits, bias, mask);
  wb_router_outputs outputs{};
  outputs.struct_size = sizeof(outputs);
  outputs.route = to_route(config.E, *ids, *weights, data_of<std::int32_t>(*counts), at);
  return to_error(wb_router_forward(&config, &inputs, &outputs, at.stream()));
}

// The losses count this call's rows; what the caller counts otherwise is in their weights.
void add_counts(wb_router_inputs& inputs, const Any& counts) {
  inputs.aux_counts = data_of<std::int32_t>(counts);
  inputs.aux_tokens = inputs.loss_tokens = static_cast<double>(inputs.logits.shape[0]);
}

// loss_weights [3] (auxiliary, sequence, z), or [0] for 1 each.
const float* weights_of(const F32& loss_weights) { return loss_weights.element_count() == 0 ? nullptr : data_of<float>(loss_weights); }

ffi::Error router_losses(const Place& at, Any logits, Any bias, Any mask, Any ids, F32 weights, Any counts, F32 loss_weights, F32Result losses, Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  wb_router_inputs inputs = router_inputs(at, logits, bias, mask);
  add_counts(inputs, counts);
  const wb_route route = to_route(config.E, ids, weights, nullptr, at);
  return to_error(wb_router_losses_weighted(&config, &inputs, &route, weights_of(loss_weights), data_of<float>(*losses), at.stream()));
}

ffi::Error router_backward(const Place& at, Any logits, Any bias, Any mask, Any ids, F32 weights, Any counts, F32 d_weights, F32 loss_weights,
                           F32Result d_logits, Bytes bytes) {
  wb_router_config config{};
  if (!read_config(bytes, config)) return refuse("the router's config has another size");
  wb_router_inputs inputs = router_inputs(at, logits, bias, mask);
  add_counts(inputs, counts);
  const wb_route route = to_route(config.E, ids, weights, nullptr, at);
  const wb_tensor result = to_tensor(*d_logits, at);
  return to_error(wb_router_backward_weighted(&config, &inputs, &route, data_of<float>(d_weights), weights_of(loss_weights), &result, at.stream()));
}

// product: 0 forward (a, weights -> y), 1 dgrad (weights, dy -> da), 2 wgrad (a, dy -> d_weights). offsets [L + 1] are room for those of the groups.
ffi::Error grouped_matmul(const Place& at, Any first, Any second, Any sizes, AnyResult result, I32Result offsets, std::int64_t product, bool lcn) {
  wb_grouped_gemm_args args{};
  args.struct_size = sizeof(args);
  args.weights_are_lcn = lcn ? 1 : 0;
  const wb_tensor x = to_tensor(first, at), y = to_tensor(second, at), out = to_tensor(*result, at), group_sizes = to_tensor(sizes, at);
  args.offsets = to_tensor(*offsets, at);
  const std::int64_t rows = product == 1 ? y.shape[0] : x.shape[0];
  WB_FFI_TRY(wb_group_rows(&group_sizes, &args.offsets, product == 2 ? nullptr : &out, rows, at.stream()));
  switch (product) {
    case 0:
      args.a = x, args.weights = y, args.y = out;
      return to_error(wb_grouped_gemm(&args, at.stream()));
    case 1:
      args.weights = x, args.y = y, args.a = out;
      return to_error(wb_grouped_gemm_dgrad(&args, at.stream()));
    default:
      args.a = x, args.y = y, args.weights = out;
      return to_error(wb_grouped_gemm_wgrad(&args, at.stream()));
  }
}

wb_quantized quantized(const wb_tensor& codes, const wb_tensor& scales) {
  wb_quantized result{};
  result.struct_size = sizeof(result);
  result.codes = codes;
  result.scales = scales;
  return result;
}

ffi::Error quantize(const Place& at, Any x, AnyResult codes, AnyResult scales, Bytes bytes) {
  wb_quant_config config{};
  if (!read_config(bytes, config)) return refuse("the format's config has another size");
  const wb_tensor from = to_tensor(x, at);
  const wb_quantized out = quantized(to_tensor(*codes, at), to_tensor(*scales, at));
  return to_error(wb_quantize(&config, &from, nullptr, &out, at.stream()));
}

ffi::Error dequantize(const Place& at, Any codes, Any scales, AnyResult y, Bytes bytes) {
  wb_quant_config config{};
  if (!read_config(bytes, config)) return refuse("the format's config has another size");
  const wb_quantized from = quantized(to_tensor(codes, at), to_tensor(scales, at));
  const wb_tensor to = to_tensor(*y, at);
  return to_error(wb_dequantize(&config, &from, nullptr, &to, at.stream()));
}

auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace

#define WB_FFI_OP(name, arguments)                                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_##name, On<name>::cpu, ffi::Ffi::Bind() arguments); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_##name##_cuda, On<name>::cuda, on_cuda() arguments, {ffi::Traits::kCmdBufferCompatible})

WB_FFI_OP(router_forward, .Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Ret<F32>().Ret<ffi::Buffer<ffi::S32>>().Attr<Bytes>("config"));
WB_FFI_OP(router_losses, .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<Any>().Arg<F32>().Ret<F32>().Attr<Bytes>("config"));
WB_FFI_OP(router_backward, .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<Any>().Arg<F32>().Arg<F32>().Ret<F32>().Attr<Bytes>("config"));
WB_FFI_OP(grouped_matmul, .Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>().Ret<ffi::Buffer<ffi::S32>>().Attr<std::int64_t>("product").Attr<bool>("lcn"));
WB_FFI_OP(quantize, .Arg<Any>().Ret<Any>().Ret<Any>().Attr<Bytes>("config"));
WB_FFI_OP(dequantize, .Arg<Any>().Arg<Any>().Ret<Any>().Attr<Bytes>("config"));

#undef WB_FFI_OP

}  // namespace waybill::jax
