// SPDX-License-Identifier: Apache-2.0
#include "ops/optimizer/optimizer_ref.h"

#include <cmath>

namespace waybill::ref {

void adamw(const OptimizerConfig& config, double learning_rate, double gradient_scale, std::int64_t step, bool decay, std::int64_t count, const float* grad,
           double* value, double* m, double* v) {
  const double beta1 = config.beta1, beta2 = config.beta2, t = static_cast<double>(step);
  for (std::int64_t i = 0; i < count; ++i) {
    const double g = gradient_scale * grad[i];
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    const double update = m[i] / (1 - std::pow(beta1, t)) / (std::sqrt(v[i] / (1 - std::pow(beta2, t))) + config.epsilon);
    value[i] -= learning_rate * (update + (decay ? config.weight_decay * value[i] : 0.0));
  }
}

}  // namespace waybill::ref
