// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_instances.cuh"

namespace waybill::cuda {

WB_GEMM_TABLE_OF(grouped_kernels_nn_activation, kNN, kBf16, kActivation, WB_GEMM_TILES_ACTIVATION)

}  // namespace waybill::cuda
