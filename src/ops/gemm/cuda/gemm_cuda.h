// SPDX-License-Identifier: Apache-2.0
// The CUDA implementations behind grouped_gemm() and its siblings.
#pragma once

namespace waybill::cuda {

// Makes the kernels available to grouped_gemm(), grouped_gemm_dgrad() and grouped_gemm_wgrad(). Once per process, before the first call.
void register_gemm();

}  // namespace waybill::cuda
