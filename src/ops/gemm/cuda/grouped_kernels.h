// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, one table a form and output. A new tile is added to WB_GEMM_TILES.
#pragma once

#include <span>

#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

std::span<const GemmKernel> grouped_kernels_nt_bf16();
std::span<const GemmKernel> grouped_kernels_nt_f32();
std::span<const GemmKernel> grouped_kernels_nt_add();
std::span<const GemmKernel> grouped_kernels_nn_bf16();
std::span<const GemmKernel> grouped_kernels_nn_f32();
std::span<const GemmKernel> grouped_kernels_nn_add();
std::span<const GemmKernel> grouped_kernels_tn_bf16();
std::span<const GemmKernel> grouped_kernels_tn_f32();
std::span<const GemmKernel> grouped_kernels_tn_add();
std::span<const GemmKernel> grouped_kernels_nt_activation();
std::span<const GemmKernel> grouped_kernels_nn_activation();
std::span<const GemmKernel> grouped_kernels_nt_gradient();
std::span<const GemmKernel> grouped_kernels_nn_gradient();

}  // namespace waybill::cuda
