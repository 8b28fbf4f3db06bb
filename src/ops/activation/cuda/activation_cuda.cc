// SPDX-License-Identifier: Apache-2.0
#include "ops/activation/cuda/activation_cuda.h"

#include <fmt/format.h>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/activation/cuda/activation_kernels.h"
#include "ops/activation/device_backend.h"

namespace waybill::cuda {
namespace {

using detail::ActivationDeviceCall;

ActivationMatrix matrix(const char* name, const TensorView& view) {
  const std::size_t size = size_bytes(view.dtype);
  WB_CHECK(reinterpret_cast<std::uintptr_t>(view.data) % size == 0, "activation: {} must be aligned to its elements of {} bytes, got address {}", name, size,
           fmt::ptr(view.data));
  return {view.data, view.stride[0], view.dtype == DType::kBF16};
}

int num_sms(int device) {
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

ActivationCall convert(const ActivationDeviceCall& x) {
  ActivationCall call{
      static_cast<int>(x.config.kind), x.config.limit, x.config.alpha, x.a.shape[0], x.a.shape[1], x.num_rows, x.weight, {}, {}, {}, x.d_weight};
  call.h = matrix("h", x.h), call.a = matrix("a or da", x.a);
  if (x.dh) call.dh = matrix("dh", x.dh);
  return call;
}

void forward(const ActivationDeviceCall& call) {
  const int device = call.stream.device.index;
  const DeviceGuard guard(device);
  launch_activation_forward(convert(call), num_sms(device), static_cast<cudaStream_t>(call.stream.native));
  check_launch("activation_forward");
}
void backward(const ActivationDeviceCall& call) {
  const int device = call.stream.device.index;
  const DeviceGuard guard(device);
  launch_activation_backward(convert(call), num_sms(device), static_cast<cudaStream_t>(call.stream.native));
  check_launch("activation_backward");
}

constexpr detail::ActivationDeviceBackend kBackend = {forward, backward};

}  // namespace

void register_activation() { detail::g_activation_device_backend = &kBackend; }

}  // namespace waybill::cuda
