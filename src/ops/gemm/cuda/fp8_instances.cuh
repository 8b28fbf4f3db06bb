// SPDX-License-Identifier: Apache-2.0
// Instantiates grouped_fp8_sm90 for one form, output and pair of element formats at every tile that choose_fp8_tuning() knows.
#pragma once

#include "ops/gemm/cuda/fp8_kernels.h"
#include "ops/gemm/cuda/fp8_sm90.cuh"

// F(columns of a tile, stages, CTAs of a cluster, buffers)
// 128 columns in up to four stages: 192 rows.
#define WB_FP8_TILES(F) F(256, 4, 2, 2) F(128, 5, 2, 2) F(128, 5, 1, 2) F(128, 4, 2, 2)
#define WB_FP8_TILES_TN(F) F(192, 4, 2, 3) F(128, 4, 2, 2)
// With three stages D's values are fetched (grouped_accumulate.cuh), else the copy engine adds.
#define WB_FP8_TILES_TN_ADD(F) F(192, 4, 2, 2) F(192, 3, 2, 6) F(128, 4, 2, 2) F(128, 3, 2, 4)

#define WB_FP8_TABLE(function, form, output, types, tiles)    \
  std::span<const Fp8Kernel> function() {                     \
    static constexpr GemmForm kForm = GemmForm::form;         \
    static constexpr GemmOutput kOutput = GemmOutput::output; \
    static constexpr Fp8Types kTypes = Fp8Types::types;       \
    static const Fp8Kernel kernels[] = {tiles(WB_FP8_ENTRY)}; \
    return kernels;                                           \
  }
#define WB_FP8_ENTRY(columns, stages, cluster, buffers) \
  {kForm, kOutput, kTypes, {columns, stages, cluster, buffers}, grouped_fp8_sm90<Fp8Config<kForm, kOutput, kTypes, columns, stages, cluster, buffers>>},
