// SPDX-License-Identifier: Apache-2.0
// Single values of a tensor of rows, fp32 or bf16.
#pragma once

#include <cuda_bf16.h>

#include "core/cuda/wide_codes.cuh"
#include "ops/quantize/cuda/quantize_params.h"

namespace waybill::cuda {

// Where row `row` lies; negative: nowhere, it is zeros.
__device__ __forceinline__ std::int64_t source_row(const WideRows& x, std::int64_t row) { return x.list != nullptr ? __ldg(x.list + row) : row; }

__device__ __forceinline__ float load_value(const WideRows& x, std::int64_t row, int column) {
  if (x.list != nullptr) row = __ldg(x.list + row);
  if (row < 0) return 0.0f;
  const std::int64_t at = row * x.stride + column;
  return x.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[at]) : static_cast<const float*>(x.data)[at];
}

__device__ __forceinline__ void store_value(const WideRows& y, std::int64_t row, int column, float value) {
  const std::int64_t at = row * y.stride + column;
  if (y.is_bf16) {
    static_cast<std::uint16_t*>(y.data)[at] = bf16_bits(value);
  } else {
    static_cast<float*>(y.data)[at] = value;
  }
}

}  // namespace waybill::cuda
