// SPDX-License-Identifier: Apache-2.0
// AdamW in fp32: decoupled weight decay, bias correction, one scale for gradient clipping. Elementwise, so that results do not
// depend on how parameters are spread over ranks or threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/parameter.h"
#include "waybill/stream.h"

namespace waybill {

struct OptimizerConfig {
  float beta1 = 0.9f, beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.1f;  // applied to parameters with `decay`, as learning_rate * weight_decay * value
};
// Refuses betas outside [0, 1), epsilon <= 0 and a negative or non-finite weight decay, with the values.
WB_API void validate(const OptimizerConfig& config);

// Moments of one parameter, fp32, the parameter's shape; null tensors where it is not trainable.
struct OptimizerState {
  Tensor m, v;
};
// Zero moments, one per parameter, in the order of `parameters`.
WB_API std::vector<OptimizerState> make_optimizer_states(std::span<const Parameter> parameters);

// One update of every trainable parameter. With g = gradient_scale * grad, t = step (1 for the first update):
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   value -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * value)
// learning_rate: this step's, after the schedule. gradient_scale: the clip factor, the same on every rank. states[i] belongs to
// parameters[i]. Gradients are read only. Checks sizes before anything is changed.
WB_API void adamw_step(const OptimizerConfig& config, float learning_rate, float gradient_scale, std::int64_t step, std::span<Parameter> parameters,
                       std::span<OptimizerState> states, Stream stream = {});

// Plain gradient descent, value -= learning_rate * gradient_scale * grad: it hides no wrong gradient scale, so tests use it.
WB_API void sgd_step(float learning_rate, float gradient_scale, std::span<Parameter> parameters, Stream stream = {});

// sqrt of the sum of squared norms: `replicated` are squares of parameters every rank holds, counted once; `experts` the squares of
// every expert of the world, each once (0 for an expert without tokens). Summed in order, so equal inputs give equal bits.
WB_API double norm_from_parts(std::span<const double> replicated, std::span<const double> experts);

// min(1, max_norm / norm); 1 when max_norm <= 0 (clipping off). A NaN norm gives 1: the caller must refuse the step (isfinite(norm)).
WB_API double clip_scale(double norm, double max_norm);

}  // namespace waybill
