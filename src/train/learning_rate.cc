// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numbers>

#include "waybill/trainer.h"

namespace waybill {

double learning_rate_at(const TrainSettings& train, std::int64_t step) {
  if (step < train.warmup_steps) return train.learning_rate * static_cast<double>(step + 1) / static_cast<double>(train.warmup_steps);
  const std::int64_t last = train.steps - 1, decay = last - train.warmup_steps;
  const double progress = decay <= 0 ? 1.0 : std::min(1.0, static_cast<double>(step - train.warmup_steps) / static_cast<double>(decay));
  return train.min_learning_rate + 0.5 * (train.learning_rate - train.min_learning_rate) * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace waybill
