// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/fp8_instances.cuh"

namespace waybill::cuda {

WB_FP8_TABLE(fp8_kernels_nt_e4m3_bf16, kNT, kBf16, kE4M3, WB_FP8_TILES)
WB_FP8_TABLE(fp8_kernels_nt_e4m3_f32, kNT, kF32, kE4M3, WB_FP8_TILES)
WB_FP8_TABLE(fp8_kernels_nt_e4m3_add, kNT, kAddF32, kE4M3, WB_FP8_TILES)

}  // namespace waybill::cuda
