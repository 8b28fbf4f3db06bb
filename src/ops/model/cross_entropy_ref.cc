// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "ops/model/cross_entropy.h"

namespace waybill::ref {

CrossEntropySum cross_entropy(const TensorView& x, const TensorView& head, const std::int32_t* targets, float scale, const TensorView& dx,
                              const TensorView& d_head) {
  const std::int64_t T = x.shape[0], H = x.shape[1], vocab = head.shape[0];
  const float *xp = x.as<float>(), *wp = head.as<float>();
  CrossEntropySum result;
  std::vector<double> p(static_cast<std::size_t>(vocab));
  for (std::int64_t t = 0; t < T; ++t) {
    if (dx)
      for (std::int64_t i = 0; i < H; ++i) dx.as<float>()[t * H + i] = 0;
    if (targets[t] < 0) continue;
    double total = 0;
    for (std::int64_t n = 0; n < vocab; ++n) {
      double logit = 0;
      for (std::int64_t i = 0; i < H; ++i) logit += static_cast<double>(xp[t * H + i]) * wp[n * H + i];
      p[static_cast<std::size_t>(n)] = std::exp(logit);
      total += p[static_cast<std::size_t>(n)];
    }
    result.loss -= std::log(p[static_cast<std::size_t>(targets[t])] / total);
    ++result.count;
    if (!dx) continue;
    for (std::int64_t i = 0; i < H; ++i) {
      double sum = 0;
      for (std::int64_t n = 0; n < vocab; ++n) {
        const double d = scale * (p[static_cast<std::size_t>(n)] / total - (n == targets[t] ? 1.0 : 0.0));
        sum += d * wp[n * H + i];
        d_head.as<float>()[n * H + i] += static_cast<float>(d * xp[t * H + i]);
      }
      dx.as<float>()[t * H + i] = static_cast<float>(sum);
    }
  }
  return result;
}

}  // namespace waybill::ref
