// SPDX-License-Identifier: Apache-2.0
// The MoE block on GPUs: two ops that queue on XLA's stream and wait for nothing. The layers are made by Python when a program is traced
// (wbx_make_device_layer) or, for groups of several GPUs of this process, when it is lowered (wbx_make_local_layer); a program that comes from a cache makes
// the layer of a single process by itself.
#include "device_registry.h"

namespace waybill::jax {
namespace {

using Any = ffi::AnyBuffer;
using AnyResult = ffi::Result<ffi::AnyBuffer>;

constexpr std::int64_t kNumParameters = 10;  // in this order, those that `given` names by bit; the next bits: a padding mask, a seed u32 [2] follow
constexpr std::int64_t kRouterBias = 1;

wb_tensor* field(wb_moe_tensors& tensors, std::int64_t index) {
  wb_tensor* const fields[kNumParameters] = {&tensors.gate, &tensors.router_bias, &tensors.w1,        &tensors.w2,          &tensors.b1,
                                             &tensors.b2,   &tensors.shared_w1,   &tensors.shared_w2, &tensors.latent_down, &tensors.latent_up};
  return fields[index];
}

// What both directions are given.
struct Call {
  Place at;
  wb_device_moe* layer = nullptr;
  wb_moe_tensors parameters{};
  wb_moe_forward_options options{};
  wb_tensor x{};
  std::size_t num_read = 0;  // of the remaining arguments

  ffi::Error read(void* stream, std::int32_t ordinal, const Any& rows, const ffi::RemainingArgs& rest, std::int64_t given, std::int64_t P, const Groups& groups,
                  const Bytes& bytes) {
    wb_moe_config config{};
    if (!read_config(bytes, config)) return refuse("the block's config has another size");
    std::int32_t device = 0;
    ffi::Error error = DeviceLayers::instance().find(config, static_cast<std::int32_t>(P), groups, ordinal, 0, &layer, &device);
    if (error.failure()) return error;
    at = Place(device, stream);
    (void)wb_moe_forward_options_init(&options, sizeof(options));
    x = to_tensor(rows, at);
    parameters.struct_size = sizeof(parameters);
    for (std::int64_t i = 0; i < kNumParameters; ++i) {
      if ((given >> i & 1) != 0) *field(parameters, i) = to_tensor(*rest.get<Any>(num_read++), at);
    }
    if ((given >> kNumParameters & 1) != 0) options.padding_mask = to_tensor(*rest.get<Any>(num_read++), at);
    // Low word first, as the device reads a u64; XLA aligns its arrays.
    if ((given >> (kNumParameters + 1) & 1) != 0) options.rounding_seed_device = data_of<std::uint64_t>(*rest.get<Any>(num_read++));
    return ffi::Error::Success();
  }
};

ffi::Error forward(void* stream, std::int32_t device, Any x, ffi::RemainingArgs rest, AnyResult out, AnyResult ids, AnyResult weights, AnyResult counts,
                   AnyResult losses, AnyResult status, AnyResult saved, std::int64_t given, std::int64_t P, bool training, Groups groups, Bytes bytes) {
  Call call;
  if (ffi::Error error = call.read(stream, device, x, rest, given, P, groups, bytes); error.failure()) return error;
  call.options.training = training ? 1 : 0;
  wb_device_moe_outputs to{};
  to.struct_size = sizeof(to);
  to.out = to_tensor(*out, call.at), to.ids = to_tensor(*ids, call.at), to.weights = to_tensor(*weights, call.at), to.counts = to_tensor(*counts, call.at);
  to.losses = to_tensor(*losses, call.at), to.status = to_tensor(*status, call.at);
  if (training) to.saved = to_tensor(*saved, call.at);
  return to_error(wb_device_moe_forward(call.layer, &call.parameters, &call.x, &call.options, &to, call.at.stream()));
}

// rest: parameters, mask, seed, saved, d_out, loss weights [3], [6] or [0]. Results: dx, then a gradient for each given parameter but the router bias.
ffi::Error backward(void* stream, std::int32_t device, Any x, ffi::RemainingArgs rest, ffi::RemainingRets results, std::int64_t given, std::int64_t P,
                    Groups groups, Bytes bytes) {
  Call call;
  if (ffi::Error error = call.read(stream, device, x, rest, given, P, groups, bytes); error.failure()) return error;
  const auto argument = [&](std::size_t index) { return *rest.get<Any>(call.num_read + index); };
  const wb_tensor saved = to_tensor(argument(0), call.at), d_out = to_tensor(argument(1), call.at), dx = to_tensor(**results.get<Any>(0), call.at);
  const Any factors = argument(2);
  wb_moe_tensors gradients{};
  gradients.struct_size = sizeof(gradients);
  std::size_t result = 1;
  for (std::int64_t i = 0; i < kNumParameters; ++i) {
    if ((given >> i & 1) != 0 && i != kRouterBias) *field(gradients, i) = to_tensor(**results.get<Any>(result++), call.at);
  }
  return to_error(wb_device_moe_backward(call.layer, &call.parameters, &gradients, &call.x, &d_out, &dx, &call.options, &saved,
                                         factors.element_count() > 0 ? data_of<float>(factors) : nullptr, call.at.stream()));
}

auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>().Arg<Any>().RemainingArgs(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_device_moe_forward_cuda, forward,
                              on_cuda()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Attr<std::int64_t>("given")
                                  .Attr<std::int64_t>("P")
                                  .Attr<bool>("training")
                                  .Attr<Groups>("groups")
                                  .Attr<Bytes>("config"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(wbx_device_moe_backward_cuda, backward,
                              on_cuda().RemainingRets().Attr<std::int64_t>("given").Attr<std::int64_t>("P").Attr<Groups>("groups").Attr<Bytes>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace waybill::jax

// For Python (ctypes). Before the calls below and the first execution.
extern "C" __attribute__((visibility("default"))) void wbx_set_process(std::int32_t index) { waybill::jax::this_process = index; }

// For Python (ctypes): a wb_status. Collective over the group's processes; waits for the device.
extern "C" __attribute__((visibility("default"))) int wbx_make_device_layer(const wb_moe_config* config, std::int32_t P, std::int32_t device,
                                                                            std::int32_t index, const wb_process_group* group) {
  wb_device_moe* layer = nullptr;
  return waybill::jax::DeviceLayers::instance().get(*config, P, device, index, group, true, &layer);
}

// For Python (ctypes): a wb_status. All P layers of a group within this process, rank r on XLA's device ordinals[r], which is CUDA's devices[r]; waits for the
// devices.
extern "C" __attribute__((visibility("default"))) int wbx_make_local_layer(const wb_moe_config* config, std::int32_t P, const std::int32_t* ordinals,
                                                                           const std::int32_t* devices, std::int32_t index) {
  return waybill::jax::DeviceLayers::instance().make_local(*config, P, ordinals, devices, index);
}
