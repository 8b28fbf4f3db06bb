// SPDX-License-Identifier: Apache-2.0
// The local experts' two matmuls on received rows, forward and backward. No copy of the rows in expert order exists: both
// directions gather through slot_row.
#pragma once

#include "moe/recipe_operands.h"
#include "waybill/moe.h"

namespace waybill::moe {

struct ExpertScratch {
  Tensor y;       // [S_padded, row_width]: second matmul's output; in backward the rows' gradient per slot
  Tensor da, dh;  // [S_padded, local_F], [S_padded, inner_width]
  OperandScratch operands;
};

struct ExpertContext {
  const MoeConfig& config;
  const MoeTensors& parameters;
  const ReceiveLayout& layout;
  std::span<const std::int64_t> expert_ids;  // [L] global ids: random numbers of the recipe hang on them
  std::uint64_t rounding_seed = 0;
  bool second_bias = false;  // this rank adds b2
  Stream stream;
  PhaseTimes* times = nullptr;
};

// Matmuls multiply the operands of config.recipe; everything else is fp32.
// h [S_padded, inner_width] = rows[slot_row] w1^T + b1.   rows [R, row_width]
void experts_first_matmul(const ExpertContext& context, const TensorView& rows, ExpertScratch& scratch, Tensor& h);
// a [S_padded, local_F] = weight * act(h).
void experts_activation(const ExpertContext& context, const TensorView& h, Tensor& a);
// z [R, row_width] = sum over a row's slots, in order k, of a w2^T + weight * b2.
void experts_second_matmul(const ExpertContext& context, const TensorView& a, ExpertScratch& scratch, Tensor& z);

// From dz [R, row_width] to d_rows [R, row_width] (written), d_weight [S_padded] (written), gradients of w1, w2, b1, b2 (+=).
void experts_backward(const ExpertContext& context, const MoeTensors& gradients, const TensorView& rows, const TensorView& h, const TensorView& a,
                      const TensorView& dz, ExpertScratch& scratch, float* d_weight, Tensor& d_rows);

// Multiply-adds x 2 of both matmuls of one forward over the real slots; a backward costs twice that.
double expert_forward_flops(const MoeConfig& config, std::int64_t slots);

}  // namespace waybill::moe
