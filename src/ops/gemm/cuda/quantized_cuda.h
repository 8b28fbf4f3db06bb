// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation behind quantized_gemm() and its siblings.
#pragma once

namespace waybill::cuda {

// Once per process, before the first call; register_gemm() and register_quantize() belong to it.
void register_quantized_gemm();

}  // namespace waybill::cuda
