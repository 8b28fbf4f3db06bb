// SPDX-License-Identifier: Apache-2.0
// The CUDA implementations behind grouped_gemm() and its siblings.
#pragma once

#include <cstdint>

#include "waybill/status.h"
#include "waybill/stream.h"

namespace waybill::cuda {

// Makes the kernels available to grouped_gemm(), grouped_gemm_dgrad() and grouped_gemm_wgrad(). Once per process, before the first call.
void register_gemm();

// Columns of both operands of a wgrad: d[g, i, j] (+)= sum over the group's rows s of a[s, i] b[s, j], with the bits that the product of
// [whole_m, whole_n] a group has there. a [rows, m] and b [rows, n] bf16, contiguous; d: the part's first element in the whole result.
struct WgradPart {
  const void *a, *b;
  const std::int32_t* offsets;
  std::int64_t groups, rows, m, n, whole_m, whole_n;
  void* d;
  bool is_bf16, accumulate;
  StatusWord* status;
};
void run_wgrad_part(const WgradPart& part, Stream stream);

// Columns of a product that is ragged in its rows: d[s, j] = sum over k of a[s, k] w[g, first + j, k] (is_dgrad: w[g, k, first + j]), with the bits that the
// product of all `whole_n` columns has there. a [rows, k], weights [groups, whole_n, k] ([groups, k, whole_n]), d [rows, n] bf16, contiguous.
struct ProductPart {
  bool is_dgrad;
  const void *a, *weights;
  const std::int32_t* offsets;
  std::int64_t groups, rows, k, whole_n, first, n;
  void* d;
  StatusWord* status;
};
void run_product_part(const ProductPart& part, Stream stream);

}  // namespace waybill::cuda
