// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_instances.cuh"

namespace waybill::cuda {

WB_GEMM_TABLE(grouped_kernels_nn_bf16, kNN, kBf16, WB_GEMM_TILES)

}  // namespace waybill::cuda
