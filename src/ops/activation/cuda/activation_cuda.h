// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation behind activation_forward() and activation_backward().
#pragma once

namespace waybill::cuda {

// Makes the kernels available. Once per process, before the first call.
void register_activation();

}  // namespace waybill::cuda
