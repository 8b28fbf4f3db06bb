// SPDX-License-Identifier: Apache-2.0
// Instantiates grouped_gemm_sm90 for one form and output at every tile of the policy (tuning.h).
#pragma once

#include "ops/gemm/cuda/grouped_kernels.h"
#include "ops/gemm/cuda/grouped_sm90.cuh"

// F(columns of a tile, stages, CTAs of a cluster)
#define WB_GEMM_TILES(F) F(256, 4, 2) F(256, 4, 1) F(192, 5, 2) F(192, 5, 1) F(128, 6, 2) F(128, 6, 1)

#define WB_GEMM_TABLE(function, form, output)                                                                               \
  std::span<const GemmKernel> function() {                                                                                  \
    static constexpr GemmForm kForm = GemmForm::form;                                                                       \
    static constexpr GemmOutput kOutput = GemmOutput::output;                                                               \
    static const GemmKernel kernels[] = {WB_GEMM_TILES(WB_GEMM_ENTRY)};                                                     \
    return kernels;                                                                                                         \
  }
#define WB_GEMM_ENTRY(columns, stages, cluster) \
  {kForm, kOutput, {columns, stages, cluster}, grouped_gemm_sm90<GroupedConfig<kForm, kOutput, columns, stages, cluster>>},
