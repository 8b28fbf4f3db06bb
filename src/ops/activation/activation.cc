// SPDX-License-Identifier: Apache-2.0
#include "waybill/activation.h"

#include <cmath>

#include "ops/activation/activation_ref.h"

namespace waybill {
namespace {

void check_matrix(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns) {
  WB_CHECK(view.rank == 2 && view.shape[0] == rows && view.shape[1] == columns, "activation: {} must be [{}, {}], got {}", name, rows, columns,
           view.describe());
  WB_CHECK(view.dtype == DType::kF32 || view.dtype == DType::kBF16, "activation: {} must be f32 or bf16, got {}", name, view.describe());
  WB_CHECK(view.device.type == DeviceType::kCpu, "activation: {} is not on the cpu: {}", name, view.describe());
  WB_CHECK(columns <= 1 || view.stride[1] == 1, "activation: the columns of {} must be adjacent, got stride {}", name, view.stride[1]);
  WB_CHECK(rows <= 1 || view.stride[0] >= columns, "activation: row stride {} of {} is less than its {} columns", view.stride[0], name, columns);
  WB_CHECK(view.data != nullptr || view.size() == 0, "activation: {} has no memory: {}", name, view.describe());
}

void check_config(const ActivationConfig& config) {
  const int kind = static_cast<int>(config.kind);
  WB_CHECK(kind >= 0 && kind <= static_cast<int>(Activation::kReluSquared), "activation: unknown kind {}", kind);
  if (config.kind != Activation::kClampedSwiGLU) return;
  WB_CHECK(config.limit > 0, "activation: the clamp limit must be > 0, got {}", config.limit);
  WB_CHECK(std::isfinite(config.alpha), "activation: alpha must be finite, got {}", config.alpha);
}

}  // namespace

std::int64_t activation_input_width(const ActivationConfig& config, std::int64_t F) { return config.kind == Activation::kReluSquared ? F : 2 * F; }

void activation_forward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& a, Stream) {
  check_config(config);
  WB_CHECK(a.rank == 2, "activation: a must be [S, F], got {}", a.describe());
  check_matrix("a", a, a.shape[0], a.shape[1]);
  check_matrix("h", h, a.shape[0], activation_input_width(config, a.shape[1]));
  activation_forward_ref(config, h, weight, a);
}

void activation_backward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& da, const TensorView& dh, float* d_weight,
                         Stream) {
  check_config(config);
  WB_CHECK(da.rank == 2, "activation: da must be [S, F], got {}", da.describe());
  check_matrix("da", da, da.shape[0], da.shape[1]);
  const std::int64_t width = activation_input_width(config, da.shape[1]);
  check_matrix("h", h, da.shape[0], width);
  check_matrix("dh", dh, da.shape[0], width);
  activation_backward_ref(config, h, weight, da, dh, d_weight);
}

}  // namespace waybill
