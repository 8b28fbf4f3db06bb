// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ops/model/rope.h"

namespace waybill::ref {

void rope(float theta, const TensorView& x, std::int64_t seq_len, bool inverse) {
  const std::int64_t rows = x.shape[0] * x.shape[1], heads = x.shape[1], D = x.shape[2];
  float* xp = x.as<float>();
  for (std::int64_t r = 0; r < rows; ++r) {
    const double position = static_cast<double>(r / heads % seq_len) * (inverse ? -1 : 1);
    for (std::int64_t i = 0; i < D / 2; ++i) {
      const double angle = position * std::pow(static_cast<double>(theta), -2.0 * static_cast<double>(i) / static_cast<double>(D));
      float &a = xp[r * D + i], &b = xp[r * D + i + D / 2];
      const double u = a, v = b;
      a = static_cast<float>(u * std::cos(angle) - v * std::sin(angle));
      b = static_cast<float>(v * std::cos(angle) + u * std::sin(angle));
    }
  }
}

}  // namespace waybill::ref
