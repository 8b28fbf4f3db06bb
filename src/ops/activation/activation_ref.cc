// SPDX-License-Identifier: Apache-2.0
#include "ops/activation/activation_ref.h"

#include <algorithm>
#include <cmath>

namespace waybill {
namespace {

float load(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::int64_t index = row * view.stride[0] + column;
  return view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[index] : static_cast<float>(static_cast<const bf16*>(view.data)[index]);
}

void store(const TensorView& view, std::int64_t row, std::int64_t column, double value) {
  const std::int64_t index = row * view.stride[0] + column;
  if (view.dtype == DType::kF32) {
    static_cast<float*>(view.data)[index] = static_cast<float>(value);
  } else {
    static_cast<bf16*>(view.data)[index] = bf16(static_cast<float>(value));
  }
}

struct Point {
  double value, d_gate, d_up;  // act(gate, up) and its partial derivatives; d_up is unused by the kinds without a gate
};

Point evaluate(const ActivationConfig& config, double gate, double up) {
  switch (config.kind) {
    case Activation::kSwiGLU: {
      const double s = 1 / (1 + std::exp(-gate));
      return {gate * s * up, s * (1 + gate * (1 - s)) * up, gate * s};
    }
    case Activation::kClampedSwiGLU: {
      const double limit = config.limit, alpha = config.alpha;
      const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
      const double s = 1 / (1 + std::exp(-alpha * g));
      // A clamped input has derivative 0; the limit itself still counts as inside.
      return {g * s * (u + 1), gate > limit ? 0 : s * (1 + alpha * g * (1 - s)) * (u + 1), std::abs(up) > limit ? 0 : g * s};
    }
    case Activation::kReluSquared:
      break;
  }
  const double positive = gate > 0 ? gate : 0;
  return {positive * positive, 2 * positive, 0};
}

bool is_gated(const ActivationConfig& config) { return config.kind != Activation::kReluSquared; }

}  // namespace

void activation_forward_ref(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& a) {
  const std::int64_t F = a.shape[1];
  for (std::int64_t s = 0; s < a.shape[0]; ++s) {
    for (std::int64_t f = 0; f < F; ++f) {
      const double value = evaluate(config, load(h, s, f), is_gated(config) ? load(h, s, F + f) : 0).value;
      store(a, s, f, weight == nullptr ? value : weight[s] * value);
    }
  }
}

void activation_backward_ref(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& da, const TensorView& dh,
                             float* d_weight) {
  const std::int64_t F = da.shape[1];
  for (std::int64_t s = 0; s < da.shape[0]; ++s) {
    double sum = 0;
    for (std::int64_t f = 0; f < F; ++f) {
      const Point p = evaluate(config, load(h, s, f), is_gated(config) ? load(h, s, F + f) : 0);
      const double d = load(da, s, f), weighted = weight == nullptr ? d : d * weight[s];
      sum += d * p.value;
      store(dh, s, f, weighted * p.d_gate);
      if (is_gated(config)) store(dh, s, F + f, weighted * p.d_up);
    }
    if (d_weight != nullptr) d_weight[s] = static_cast<float>(sum);
  }
}

}  // namespace waybill
