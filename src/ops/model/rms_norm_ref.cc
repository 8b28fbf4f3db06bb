// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ops/model/rms_norm.h"

namespace waybill::ref {

void rms_norm_forward(const TensorView& x, const TensorView& weight, float epsilon, const TensorView& y, float* rstd) {
  const std::int64_t rows = x.shape[0], width = x.shape[1];
  const float *xp = x.as<float>(), *wp = weight.as<float>();
  float* yp = y.as<float>();
  for (std::int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (std::int64_t i = 0; i < width; ++i) squares += static_cast<double>(xp[r * width + i]) * xp[r * width + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
    if (rstd != nullptr) rstd[r] = static_cast<float>(scale);
    for (std::int64_t i = 0; i < width; ++i) yp[r * width + i] = static_cast<float>(xp[r * width + i] * scale * wp[i]);
  }
}

void rms_norm_backward(const TensorView& x, const TensorView& weight, const float* rstd, const TensorView& dy, const TensorView& dx, bool accumulate,
                       const TensorView& d_weight) {
  const std::int64_t rows = x.shape[0], width = x.shape[1];
  const float *xp = x.as<float>(), *wp = weight.as<float>(), *dyp = dy.as<float>();
  float *dxp = dx.as<float>(), *dwp = d_weight.as<float>();
  for (std::int64_t r = 0; r < rows; ++r) {
    double dot = 0;
    for (std::int64_t i = 0; i < width; ++i) dot += static_cast<double>(dyp[r * width + i]) * wp[i] * xp[r * width + i] * rstd[r];
    for (std::int64_t i = 0; i < width; ++i) {
      const std::int64_t at = r * width + i;
      const double xhat = static_cast<double>(xp[at]) * rstd[r], g = dyp[at];
      const double d = rstd[r] * (g * wp[i] - xhat * dot / static_cast<double>(width));
      dwp[i] += static_cast<float>(g * xhat);
      dxp[at] = static_cast<float>(accumulate ? dxp[at] + d : d);
    }
  }
}

}  // namespace waybill::ref
