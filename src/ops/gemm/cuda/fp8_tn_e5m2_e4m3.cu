// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/fp8_instances.cuh"

namespace waybill::cuda {

WB_FP8_TABLE(fp8_kernels_tn_e5m2_e4m3_bf16, kTN, kBf16, kE5M2E4M3, WB_FP8_TILES_TN)
WB_FP8_TABLE(fp8_kernels_tn_e5m2_e4m3_f32, kTN, kF32, kE5M2E4M3, WB_FP8_TILES_TN)
WB_FP8_TABLE(fp8_kernels_tn_e5m2_e4m3_add, kTN, kAddF32, kE5M2E4M3, WB_FP8_TILES_TN_ADD)

}  // namespace waybill::cuda
