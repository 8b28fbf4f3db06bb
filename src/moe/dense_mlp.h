// SPDX-License-Identifier: Apache-2.0
// Dense parts beside the routed experts: the shared expert and plain projections.
#pragma once

#include "moe/recipe_operands.h"
#include "waybill/activation.h"
#include "waybill/stream.h"

namespace waybill::moe {

// y [T, N] (+)= x [T, C] w^T with w [N, C]; its transpose product and its weight gradient.
void project(const TensorView& x, const TensorView& w, const TensorView& y, bool accumulate, Stream stream);
void project_backward_input(const TensorView& dy, const TensorView& w, const TensorView& dx, bool accumulate, Stream stream);
void project_backward_weight(const TensorView& dy, const TensorView& x, const TensorView& dw, Stream stream);  // dw +=

// The shared expert: out += act(x w1^T) w2^T.   h [T, inner], a [T, F] are written: h is kept for backward. The operands of its matmuls are
// those of the recipe, with the rank's tokens as one group.
struct SharedExpert {
  const ActivationConfig& activation;
  const RecipeConfig& recipe;
  TensorView w1, w2;  // [inner, H], [H, F]
  std::uint64_t rounding_seed;
  OperandScratch& operands;
  Stream stream;

  void hidden(const TensorView& x, Tensor& h) const;
  void activate(const TensorView& h, Tensor& a) const;
  void add_output(const TensorView& a, const TensorView& out) const;
  // d_w1 += ..., d_w2 += ...; dh is written, da is scratch. Then the input's gradient: dx += dh w1.
  void backward_weights(const TensorView& x, const TensorView& h, const TensorView& a, const TensorView& d_out, const TensorView& d_w1, const TensorView& d_w2,
                        Tensor& da, Tensor& dh) const;
  void add_input_gradient(const TensorView& dh, const TensorView& dx) const;
};

}  // namespace waybill::moe
