// SPDX-License-Identifier: Apache-2.0
// The MoE layer and the exchange on GPUs in a library without CUDA.
#include "guard.h"

using namespace waybill;
using namespace waybill::capi;

namespace {
wb_status refuse() noexcept {
  return guarded([] { WB_FAIL(ErrorCode::kUnsupported, "this library computes on the CPU only; build it with nvcc for GPUs"); });
}
}  // namespace

wb_status wb_device_moe_create(const wb_moe_config*, int32_t, const wb_process_group*, wb_device_moe**) noexcept { return refuse(); }
wb_status wb_device_moe_create_local(const wb_moe_config*, int32_t, const int32_t*, wb_device_moe**) noexcept { return refuse(); }
void wb_device_moe_destroy(wb_device_moe*) noexcept {}
wb_status wb_device_moe_saved_bytes(const wb_moe_config*, int32_t, int64_t*) noexcept { return refuse(); }
wb_status wb_device_moe_forward(wb_device_moe*, const wb_moe_tensors*, const wb_tensor*, const wb_moe_forward_options*, const wb_device_moe_outputs*,
                                const wb_stream*) noexcept {
  return refuse();
}
wb_status wb_device_moe_backward(wb_device_moe*, const wb_moe_tensors*, const wb_moe_tensors*, const wb_tensor*, const wb_tensor*, const wb_tensor*,
                                 const wb_moe_forward_options*, const wb_tensor*, const float*, const wb_stream*) noexcept {
  return refuse();
}
wb_status wb_device_moe_get_status(wb_device_moe*, wb_step_status*, const wb_stream*) noexcept { return refuse(); }

wb_status wb_device_exchange_create(const wb_exchange_config*, int32_t, const wb_process_group*, wb_device_exchange**) noexcept { return refuse(); }
wb_status wb_device_exchange_create_local(const wb_exchange_config*, int32_t, const int32_t*, wb_device_exchange**) noexcept { return refuse(); }
void wb_device_exchange_destroy(wb_device_exchange*) noexcept {}
wb_status wb_device_exchange_dispatch(wb_device_exchange*, const wb_route*, const wb_tensor*, const wb_tensor*, int32_t*, int32_t*, const wb_stream*) noexcept {
  return refuse();
}
wb_status wb_device_exchange_combine(wb_device_exchange*, const wb_route*, const wb_tensor*, int32_t, const wb_tensor*, const wb_stream*) noexcept {
  return refuse();
}
wb_status wb_device_exchange_combine_backward(wb_device_exchange*, const wb_route*, const wb_tensor*, const wb_tensor*, const wb_tensor*, float*,
                                              const wb_stream*) noexcept {
  return refuse();
}
wb_status wb_device_exchange_dispatch_start(wb_device_exchange*, const wb_route*, const wb_tensor*, const wb_stream*) noexcept { return refuse(); }
wb_status wb_device_exchange_dispatch_done(wb_device_exchange*, const wb_tensor*, int32_t*, int32_t*, const wb_stream*) noexcept { return refuse(); }
wb_status wb_device_exchange_combine_start(wb_device_exchange*, const wb_route*, const wb_tensor*, const wb_stream*) noexcept { return refuse(); }
wb_status wb_device_exchange_combine_done(wb_device_exchange*, const wb_tensor*, const wb_stream*) noexcept { return refuse(); }
