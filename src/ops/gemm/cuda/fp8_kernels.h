// SPDX-License-Identifier: Apache-2.0
// The compiled 8-bit kernels, one table a form, pair of element formats and output. A new tile is added to WB_FP8_TILES.
#pragma once

#include <span>

#include "ops/gemm/cuda/fp8_params.h"

namespace waybill::cuda {

std::span<const Fp8Kernel> fp8_kernels_nt_e4m3_bf16();
std::span<const Fp8Kernel> fp8_kernels_nt_e4m3_f32();
std::span<const Fp8Kernel> fp8_kernels_nt_e4m3_add();
std::span<const Fp8Kernel> fp8_kernels_nt_e5m2_e4m3_bf16();
std::span<const Fp8Kernel> fp8_kernels_nt_e5m2_e4m3_f32();
std::span<const Fp8Kernel> fp8_kernels_nt_e5m2_e4m3_add();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_bf16();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_f32();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_add();
std::span<const Fp8Kernel> fp8_kernels_tn_e5m2_e4m3_bf16();
std::span<const Fp8Kernel> fp8_kernels_tn_e5m2_e4m3_f32();
std::span<const Fp8Kernel> fp8_kernels_tn_e5m2_e4m3_add();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_e5m2_bf16();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_e5m2_f32();
std::span<const Fp8Kernel> fp8_kernels_tn_e4m3_e5m2_add();

}  // namespace waybill::cuda
