// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_instances.cuh"

namespace waybill::cuda {

WB_GEMM_TABLE_OF(grouped_kernels_nn_gradient, kNN, kBf16, kActivationGradient, WB_GEMM_TILES_GRADIENT)

}  // namespace waybill::cuda
