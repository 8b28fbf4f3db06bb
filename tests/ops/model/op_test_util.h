// SPDX-License-Identifier: Apache-2.0
// Random tensors, differences and finite differences for the op tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <vector>

#include "waybill/random.h"
#include "waybill/tensor.h"

namespace waybill::testing {

inline Tensor random_tensor(std::initializer_list<std::int64_t> shape, std::uint64_t key, float scale = 1.0f) {
  Tensor t(DType::kF32, shape);
  for (std::int64_t i = 0; i < t.size(); ++i) t.as<float>()[i] = scale * random_normal(key, static_cast<std::uint64_t>(i));
  return t;
}

inline double largest(const Tensor& a) {
  double value = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) value = std::max(value, std::fabs(static_cast<double>(a.as<float>()[i])));
  return value;
}

// max |a - b| / max(max |b|, 0.1): inputs are of order 1, so a result that cancels to nothing is compared with 0.1. NaN anywhere gives NaN, which fails every
// comparison.
inline double relative_difference(const Tensor& a, const Tensor& b) {
  double worst = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a.as<float>()[i]) - b.as<float>()[i]);
    if (!(d <= worst)) worst = d;
  }
  return worst / std::max(largest(b), 0.1);
}

inline double dot(const Tensor& a, const Tensor& b) {
  double total = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) total += static_cast<double>(a.as<float>()[i]) * b.as<float>()[i];
  return total;
}

// Compares `gradient` with central differences of `value` (computed in double or from fp32 outputs) at up to 24 elements of x.
inline void expect_gradient(const char* name, Tensor& x, const Tensor& gradient, const std::function<double()>& value, double step, double tolerance) {
  const double scale = std::max(largest(gradient), 1e-6);
  const std::int64_t stride = std::max<std::int64_t>(1, x.size() / 24);
  for (std::int64_t i = 0; i < x.size(); i += stride) {
    float& element = x.as<float>()[i];
    const float kept = element;
    element = static_cast<float>(kept + step);
    const double up = element, f_up = value();
    element = static_cast<float>(kept - step);
    const double down = element, f_down = value();
    element = kept;
    EXPECT_NEAR((f_up - f_down) / (up - down), gradient.as<float>()[i], tolerance * scale) << name << " element " << i;
  }
}

}  // namespace waybill::testing
