// SPDX-License-Identifier: Apache-2.0
// Expert activations between the two matmuls, forward and backward, with the routing weight applied to their result.
//
// CPU: finished on return. GPU (all tensors, weight, d_weight and num_rows on the stream's device): queued on stream.native, nothing waits, nothing is
// allocated, graph-capturable. Repeated calls are bit-equal; a row's result does not depend on other rows. fp32 tensors get the CPU's bits but for
// d_weight, whose order of sums is the device's own; where all tensors are bf16 the sigmoid is exact to 2^-20, then rounded to bf16.
#pragma once

#include <cstdint>

#include "waybill/stream.h"

namespace waybill {

enum class Activation : std::uint8_t {
  kSwiGLU = 0,         // silu(gate) * up; h = [gate | up], 2F columns
  kClampedSwiGLU = 1,  // gate clamped above at limit, up clamped to [-limit, limit]: gate * sigmoid(alpha * gate) * (up + 1)
  kReluSquared = 2,    // max(h, 0)^2, F columns
};

struct ActivationConfig {
  Activation kind = Activation::kSwiGLU;
  float limit = 7.0f;    // clamped SwiGLU
  float alpha = 1.702f;  // clamped SwiGLU
};
// Refuses (kInvalidArgument) an unknown kind, and of clamped SwiGLU a limit that is not positive or an alpha that is not finite. The ops below do so, too.
WB_API void check_activation_config(const ActivationConfig& config);
// Columns the first matmul must produce for width F: 2F for the gated kinds, F otherwise.
WB_API std::int64_t activation_input_width(const ActivationConfig& config, std::int64_t F);

// a[s, f] = weight[s] * act(h[s, :])[f].  h [S, 2F or F], a [S, F], weight [S] fp32 or null (= 1).
// num_rows: where the tensors' device holds how many of the S rows exist (offsets[L] of a grouped matmul); rows from there on are neither read nor
// written. Null: all.
WB_API void activation_forward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& a, Stream stream = {},
                               const std::int32_t* num_rows = nullptr);

// dh and d_weight[s] = sum_f da[s, f] * act(h[s, :])[f] (fixed order). d_weight may be null. `a` is not needed: it is recomputed.
WB_API void activation_backward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& da, const TensorView& dh,
                                float* d_weight, Stream stream = {}, const std::int32_t* num_rows = nullptr);

}  // namespace waybill
