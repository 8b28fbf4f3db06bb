// SPDX-License-Identifier: Apache-2.0
// The CUDA implementations behind quantize(), quantize_both() and dequantize().
#pragma once

namespace waybill::cuda {

// Makes the kernels available. Once per process, before the first call.
void register_quantize();

}  // namespace waybill::cuda
