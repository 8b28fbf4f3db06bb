// SPDX-License-Identifier: Apache-2.0
// The activation maths on runs of fp32 columns. Every instruction set compiles these loops under its own target attribute; they use
// only core/scalar_math.h, whose bits do not depend on the instruction set, so all of them give the same result.
#pragma once

#include <cstdint>

#include "core/scalar_math.h"
#include "waybill/activation.h"

namespace waybill::detail {

#define WB_ACT_INLINE inline __attribute__((always_inline))

// One run of columns of one row. `up` and `d_up` are unused by the kinds without a gate.
struct ActivationRun {
  const float* gate;
  const float* up;
  float weight;
  std::int64_t count;
};

// A limit that is never reached turns the clamps off; SwiGLU has alpha 1 and no "+ 1" on up.
WB_ACT_INLINE float clamp_above(float x, float limit) { return x > limit ? limit : x; }
WB_ACT_INLINE float clamp_both(float x, float limit) { return x > limit ? limit : (x < -limit ? -limit : x); }

WB_ACT_INLINE void forward_run(const ActivationConfig& config, const ActivationRun& run, float* __restrict out) {
  const float* __restrict gate = run.gate;
  const float* __restrict up = run.up;
  const float weight = run.weight, limit = config.limit, alpha = config.alpha;
  if (config.kind == Activation::kSwiGLU) {
    for (std::int64_t f = 0; f < run.count; ++f) out[f] = weight * (gate[f] * scalar::sigmoid(gate[f]) * up[f]);
  } else if (config.kind == Activation::kClampedSwiGLU) {
    for (std::int64_t f = 0; f < run.count; ++f) {
      const float g = clamp_above(gate[f], limit), u = clamp_both(up[f], limit);
      out[f] = weight * (g * scalar::sigmoid(alpha * g) * (u + 1.0f));
    }
  } else {
    for (std::int64_t f = 0; f < run.count; ++f) {
      const float positive = gate[f] > 0.0f ? gate[f] : 0.0f;
      out[f] = weight * (positive * positive);
    }
  }
}

// d_gate, d_up, and product[f] = da[f] * act[f], which sums to the gradient of the weight.
WB_ACT_INLINE void backward_run(const ActivationConfig& config, const ActivationRun& run, const float* __restrict da, float* __restrict d_gate,
                                float* __restrict d_up, float* __restrict product) {
  const float* __restrict gate = run.gate;
  const float* __restrict up = run.up;
  const float weight = run.weight, limit = config.limit, alpha = config.alpha;
  if (config.kind == Activation::kSwiGLU) {
    for (std::int64_t f = 0; f < run.count; ++f) {
      const float g = gate[f], u = up[f], d = weight * da[f];
      const float s = scalar::sigmoid(g), silu = g * s;
      product[f] = da[f] * (silu * u);
      d_gate[f] = d * (u * (s + silu * (1.0f - s)));
      d_up[f] = d * silu;
    }
  } else if (config.kind == Activation::kClampedSwiGLU) {
    for (std::int64_t f = 0; f < run.count; ++f) {
      const float g = clamp_above(gate[f], limit), u = clamp_both(up[f], limit) + 1.0f, d = weight * da[f];
      const float s = scalar::sigmoid(alpha * g), gated = g * s;
      const float slope_gate = u * (s + alpha * gated * (1.0f - s));
      product[f] = da[f] * (gated * u);
      d_gate[f] = gate[f] > limit ? 0.0f : d * slope_gate;
      d_up[f] = scalar::minus_abs(up[f]) < -limit ? 0.0f : d * gated;
    }
  } else {
    for (std::int64_t f = 0; f < run.count; ++f) {
      const float positive = gate[f] > 0.0f ? gate[f] : 0.0f;
      product[f] = da[f] * (positive * positive);
      d_gate[f] = weight * da[f] * (2.0f * positive);
    }
  }
}

}  // namespace waybill::detail
