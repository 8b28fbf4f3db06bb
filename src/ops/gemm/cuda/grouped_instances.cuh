// SPDX-License-Identifier: Apache-2.0
// Instantiates grouped_gemm_sm90 for one form and output at every tile that choose_tuning() knows.
#pragma once

#include "ops/gemm/cuda/grouped_kernels.h"
#include "ops/gemm/cuda/grouped_sm90.cuh"

// F(columns of a tile, stages, CTAs of a cluster, buffers)
#define WB_GEMM_TILES(F) F(256, 4, 2, 2) F(192, 4, 2, 3) F(128, 6, 2, 2) F(256, 4, 1, 2) F(128, 6, 1, 2)
// wgrad: fewer; it gains nothing from 192 columns, and 256 in single CTAs would spill.
#define WB_GEMM_TILES_TN(F) F(256, 4, 2, 2) F(128, 6, 2, 2) F(128, 6, 1, 2)
// wgrad that adds to D: with four buffers D's values are fetched (grouped_accumulate.cuh), else the copy engine adds.
#define WB_GEMM_TILES_TN_ADD(F) WB_GEMM_TILES_TN(F) F(256, 3, 2, 4) F(128, 5, 2, 4)
// With an activation. The gradient's buffers come in pairs, gate and up.
#define WB_GEMM_TILES_ACTIVATION(F) F(256, 4, 2, 2) F(128, 6, 2, 2)
#define WB_GEMM_TILES_GRADIENT(F) F(256, 3, 2, 4) F(128, 5, 2, 4)

#define WB_GEMM_TABLE_OF(function, form, output, epilogue, tiles)     \
  std::span<const GemmKernel> function() {                            \
    static constexpr GemmForm kForm = GemmForm::form;                 \
    static constexpr GemmOutput kOutput = GemmOutput::output;         \
    static constexpr GemmEpilogue kEpilogue = GemmEpilogue::epilogue; \
    static const GemmKernel kernels[] = {tiles(WB_GEMM_ENTRY)};       \
    return kernels;                                                   \
  }
#define WB_GEMM_TABLE(function, form, output, tiles) WB_GEMM_TABLE_OF(function, form, output, kPlain, tiles)
#define WB_GEMM_ENTRY(columns, stages, cluster, buffers) \
  {kForm,                                                \
   kOutput,                                              \
   kEpilogue,                                            \
   {columns, stages, cluster, buffers},                  \
   grouped_gemm_sm90<GroupedConfig<kForm, kOutput, columns, stages, cluster, buffers, kEpilogue>>},
