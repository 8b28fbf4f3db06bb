// SPDX-License-Identifier: Apache-2.0
// Quantisers of an expert activation's result, or of its gradient, neither of which is written: waybill/quantize_activated.h.
#pragma once

#include "ops/quantize/cuda/quantize_params.h"

namespace waybill::cuda {

// h [rows, 2 F or F] bf16, rows aligned to 16 bytes, F a multiple of 8. Strides count elements.
struct ActivatedSource {
  int kind;  // Activation
  float limit, alpha;
  int F;
  const std::uint16_t* h;
  std::int64_t h_stride;
  const float* weight;  // [rows] or null
  // Gradient only.
  const std::uint16_t* da;  // [rows, F]
  std::int64_t da_stride;
  float* partial_sums;  // [rows, num_partials]: of da * act over 64 columns each; or null
  int num_partials;
};

// x: the rows' number, offsets and groups; columns: of what is quantised, F (forward), 2 F or F (gradient). x.data is not read.
struct ActivatedCall {
  WideRows x;
  ActivatedSource source;
  bool is_gradient;
};

// Blocks along a row, as launch_quantize_rows() takes them; a gradient of a gated kind: F a multiple of the block.
void launch_quantize_activated_rows(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream);
void launch_quantize_gradient_rows(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream);
// Tiles, as launch_quantize_tiles() takes them but for 128 x 128; a gradient of a gated kind with rows: F a multiple of the block.
void launch_quantize_activated_tiles(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream);
void launch_quantize_gradient_tiles(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream);
// NVFP4's first pass, as launch_group_scales().
void launch_activated_group_scales(const ActivatedCall& call, float* group_scales, cudaStream_t stream);
// d_weight [rows] from the partial sums, in the order of activation_backward().
void launch_weight_sums(const ActivatedCall& call, float* d_weight, cudaStream_t stream);

}  // namespace waybill::cuda
