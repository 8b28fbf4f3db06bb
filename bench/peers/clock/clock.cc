// SPDX-License-Identifier: Apache-2.0
// For benchmarks of the Python bindings (bench/peers/timed_library.py): functions of the C ABI with a clock around them. Loaded before libwaybill.so and
// for all to see, they are what other libraries of the process call under these names; so what a binding adds is told from what the library takes, in
// place, and the libraries that are shipped need no hook.
#include <dlfcn.h>

#include <atomic>
#include <chrono>

#include "waybill/waybill.h"

#define WBC_EXPORT extern "C" __attribute__((visibility("default")))

// Read by the benchmark: nanoseconds and calls so far, and nanoseconds of the last call and of the one before it (of a step: backward, forward).
WBC_EXPORT std::atomic<std::int64_t> wbc_nanoseconds, wbc_calls, wbc_last, wbc_previous;
std::atomic<std::int64_t> wbc_nanoseconds = 0, wbc_calls = 0, wbc_last = 0, wbc_previous = 0;
// Set by it: 1 = the calls do nothing and succeed, so that what is left is the binding's and the framework's.
WBC_EXPORT std::int32_t wbc_skip;
std::int32_t wbc_skip = 0;

namespace {

using Clock = std::chrono::steady_clock;

void* g_library = nullptr;

std::int64_t since(Clock::time_point begin) { return std::chrono::nanoseconds(Clock::now() - begin).count(); }

template <class... Parameters>
wb_status timed(wb_status (*function)(Parameters...) noexcept, Parameters... arguments) {
  wbc_calls.fetch_add(1, std::memory_order_relaxed);
  if (wbc_skip != 0) return WB_OK;
  const auto begin = Clock::now();
  const wb_status status = function(arguments...);
  const std::int64_t spent = since(begin);
  wbc_nanoseconds.fetch_add(spent, std::memory_order_relaxed);
  wbc_previous = wbc_last.exchange(spent);
  return status;
}

}  // namespace

// Opens libwaybill.so, which this process has loaded, by its path: 1 where it did.
WBC_EXPORT std::int32_t wbc_open(const char* path) noexcept {
  g_library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  return g_library != nullptr ? 1 : 0;
}

// Keeps a core busy for so long: a control that waits as long as the library takes.
WBC_EXPORT void wbc_spin(std::int64_t nanoseconds) noexcept {
  const auto begin = Clock::now();
  while (since(begin) < nanoseconds) {
  }
}

// A call before wbc_open is a bug of the benchmark, and ends it.
#define WBC_TIMED(name, parameters, ...)                                                     \
  WBC_EXPORT wb_status name parameters noexcept {                                            \
    static const auto function = reinterpret_cast<decltype(&name)>(dlsym(g_library, #name)); \
    return timed(function, __VA_ARGS__);                                                     \
  }

WBC_TIMED(wb_router_forward, (const wb_router_config* config, const wb_router_inputs* inputs, const wb_router_outputs* outputs, const wb_stream* stream),
          config, inputs, outputs, stream)
WBC_TIMED(wb_router_losses_weighted,
          (const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* weights, float* losses, const wb_stream* stream),
          config, inputs, route, weights, losses, stream)
WBC_TIMED(wb_router_backward_weighted,
          (const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights, const float* weights,
           const wb_tensor* d_logits, const wb_stream* stream),
          config, inputs, route, d_weights, weights, d_logits, stream)
WBC_TIMED(wb_group_rows, (const wb_tensor* sizes, const wb_tensor* offsets, const wb_tensor* rows, int64_t S, const wb_stream* stream), sizes, offsets, rows, S,
          stream)
WBC_TIMED(wb_grouped_gemm, (const wb_grouped_gemm_args* args, const wb_stream* stream), args, stream)
WBC_TIMED(wb_grouped_gemm_dgrad, (const wb_grouped_gemm_args* args, const wb_stream* stream), args, stream)
WBC_TIMED(wb_grouped_gemm_wgrad, (const wb_grouped_gemm_args* args, const wb_stream* stream), args, stream)
WBC_TIMED(wb_quantize, (const wb_quant_config* config, const wb_tensor* x, const wb_tensor* offsets, const wb_quantized* out, const wb_stream* stream), config,
          x, offsets, out, stream)
WBC_TIMED(wb_device_moe_forward,
          (wb_device_moe * layer, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options,
           const wb_device_moe_outputs* outputs, const wb_stream* stream),
          layer, parameters, x, options, outputs, stream)
WBC_TIMED(wb_device_moe_backward,
          (wb_device_moe * layer, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x, const wb_tensor* d_out,
           const wb_tensor* dx, const wb_moe_forward_options* options, const wb_tensor* saved, const float* loss_weights, const wb_stream* stream),
          layer, parameters, gradients, x, d_out, dx, options, saved, loss_weights, stream)
