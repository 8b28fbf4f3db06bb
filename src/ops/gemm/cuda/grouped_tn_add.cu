// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_instances.cuh"

namespace waybill::cuda {

WB_GEMM_TABLE(grouped_kernels_tn_add, kTN, kAddF32, WB_GEMM_TILES_TN_ADD)

}  // namespace waybill::cuda
