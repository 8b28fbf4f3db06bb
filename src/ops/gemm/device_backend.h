// SPDX-License-Identifier: Apache-2.0
// Where the CUDA matmuls plug in without a CUDA header here: their library sets the pointer once, before the first call.
#pragma once

#include <string>

#include "ops/gemm/grouped_gemm_checks.h"
#include "waybill/grouped_gemm_activation.h"

namespace waybill::detail {

// A checked call on a device.
template <class Args>
struct GemmCall {
  const Args& args;
  const GroupedShape& shape;
  Stream stream;
};

// portable: only kernels that run on any supported GPU. refuse: why not; empty = accepts.
template <class Args>
struct GemmDeviceOp {
  std::string (*refuse)(const GemmCall<Args>& call, bool portable);
  void (*run)(const GemmCall<Args>& call, bool portable);
};
struct GemmDeviceBackend {
  GemmDeviceOp<GroupedGemmArgs> forward;
  GemmDeviceOp<GroupedGemmDgradArgs> dgrad;
  GemmDeviceOp<GroupedGemmWgradArgs> wgrad;
  // Fused with the activation; refuse() also says where the two calls are faster.
  GemmDeviceOp<GroupedGemmActivationArgs> activation;
  GemmDeviceOp<GroupedGemmActivationBackwardArgs> activation_backward;
};
extern const GemmDeviceBackend* g_gemm_device_backend;

}  // namespace waybill::detail
