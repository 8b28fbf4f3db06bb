// SPDX-License-Identifier: Apache-2.0
// Matmuls with an activation in their epilogue, behind grouped_gemm_activation() and its backward call.
#pragma once

#include <string>

#include "ops/gemm/device_backend.h"

namespace waybill::cuda {

// portable: ignored, there is one kind of kernel.
std::string refuse_activation(const detail::GemmCall<GroupedGemmActivationArgs>& call, bool portable);
void run_activation(const detail::GemmCall<GroupedGemmActivationArgs>& call, bool portable);
std::string refuse_activation_backward(const detail::GemmCall<GroupedGemmActivationBackwardArgs>& call, bool portable);
void run_activation_backward(const detail::GemmCall<GroupedGemmActivationBackwardArgs>& call, bool portable);

}  // namespace waybill::cuda
