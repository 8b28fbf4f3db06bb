// SPDX-License-Identifier: Apache-2.0
// For bench/peers/torch_moe.py: the library's two functions with a clock around them, so that what the binding adds is told from what they take.
#include <chrono>

#include "waybill/waybill.h"

#define WBT_EXPORT extern "C" __attribute__((visibility("default")))

// Set by the benchmark: the functions; read by it: nanoseconds in them since it cleared them.
WBT_EXPORT decltype(&wb_device_moe_forward) wbt_forward;
WBT_EXPORT decltype(&wb_device_moe_backward) wbt_backward;
WBT_EXPORT std::int64_t wbt_nanoseconds;
decltype(&wb_device_moe_forward) wbt_forward = nullptr;
decltype(&wb_device_moe_backward) wbt_backward = nullptr;
std::int64_t wbt_nanoseconds = 0;

namespace {

template <class Call>
wb_status timed(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  const wb_status status = call();
  wbt_nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
  return status;
}

}  // namespace

WBT_EXPORT wb_status wbt_timed_forward(wb_device_moe* layer, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options,
                                       const wb_device_moe_outputs* outputs, const wb_stream* stream) noexcept {
  return timed([&] { return wbt_forward(layer, parameters, x, options, outputs, stream); });
}

WBT_EXPORT wb_status wbt_timed_backward(wb_device_moe* layer, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x,
                                        const wb_tensor* d_out, const wb_tensor* dx, const wb_moe_forward_options* options, const wb_tensor* saved,
                                        const float* loss_weights, const wb_stream* stream) noexcept {
  return timed([&] { return wbt_backward(layer, parameters, gradients, x, d_out, dx, options, saved, loss_weights, stream); });
}
