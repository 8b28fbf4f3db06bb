// SPDX-License-Identifier: Apache-2.0
// Grouped products for any GPU, any alignment, fp32 and bf16, rows through a list. Plain CUDA, fp32 accumulation in order of k; no speed claim.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "waybill/status.h"

namespace waybill::cuda {

struct PortableOperand {
  const void* data;
  bool is_bf16;
  std::int64_t group_stride, outer_stride, k_stride;  // elements
  const std::int32_t* rows;                           // of the ragged dimension, through this list; outside [0, num_rows): a zero row. Or null
  std::int64_t num_rows;
};

// d[i, j] = sum over k of a[i, k] b[j, k], per group. Ragged in i (forward, dgrad) or in k (wgrad), as offsets say.
struct PortableGemm {
  PortableOperand a, b;
  bool is_k_ragged;
  int groups;
  std::int64_t rows, m, n, k;  // m: only where k is ragged; k: only where i is ragged
  const std::int32_t* offsets;
  void* d;
  bool d_is_bf16, accumulate;
  std::int64_t d_group_stride, d_row_stride;  // elements; d_row_stride: only where k is ragged
  const float* bias;                          // [groups, n] or null
  StatusWord* status;
};
void launch_gemm_portable(const PortableGemm& gemm, cudaStream_t stream);

// d_bias[g, n] (+)= sum of dy over the group's rows; rows: as above, or null.
struct BiasGrad {
  const void* dy;
  bool is_bf16;
  const std::int32_t *offsets, *rows;
  int groups;
  std::int64_t num_rows, list_rows, n;  // rows outside [0, list_rows) add nothing
  float* d_bias;
  bool accumulate;
};
void launch_bias_grad(const BiasGrad& grad, cudaStream_t stream);
// The kernel that this takes where rows are bf16 and multiples of 16 bytes (bias_grad.cu). The same bits.
bool takes_bias_grad_bf16(const BiasGrad& grad);
void launch_bias_grad_bf16(const BiasGrad& grad, cudaStream_t stream);

}  // namespace waybill::cuda
