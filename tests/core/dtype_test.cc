// SPDX-License-Identifier: Apache-2.0
#include "waybill/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace waybill {
namespace {

// The nearest value of a 16-bit format by search over all codes, ties to the even code: an oracle that shares no code.
template <class Half>
float nearest_by_search(float value) {
  float best = 0;
  std::uint16_t best_bits = 0;
  double best_error = std::numeric_limits<double>::infinity();
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    const float candidate = Half::to_float(bits);
    if (!std::isfinite(candidate)) continue;
    const double error = std::fabs(static_cast<double>(candidate) - static_cast<double>(value));
    if (error < best_error || (error == best_error && (bits & 1u) == 0 && (best_bits & 1u) != 0)) {
      best = candidate;
      best_bits = bits;
      best_error = error;
    }
  }
  return best;
}

TEST(DType, EveryFiniteCodeOfBothHalvesSurvivesARoundTrip) {
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    if (!std::isnan(bf16::to_float(bits))) {
      EXPECT_EQ(bf16::from_float(bf16::to_float(bits)), bits);
    }
    if (!std::isnan(f16::to_float(bits))) {
      EXPECT_EQ(f16::from_float(f16::to_float(bits)), bits);
    }
  }
}

TEST(DType, RoundsToNearestEven) {
  for (const float value :
       {1.00390625f, 1.01171875f, 3.14159265f, -2.7182818f, 1e-3f, 65519.0f, 5.9604645e-8f, 2.9e-8f, 6.1e-5f, 1.0009765625f, 1.00048828125f}) {
    EXPECT_EQ(f16::to_float(f16::from_float(value)), nearest_by_search<f16>(value)) << value;
    EXPECT_EQ(bf16::to_float(bf16::from_float(value)), nearest_by_search<bf16>(value)) << value;
  }
}

TEST(DType, HalfOverflowsToInfinityAt65520) {
  EXPECT_EQ(f16::to_float(f16::from_float(65519.99f)), 65504.0f);
  EXPECT_TRUE(std::isinf(f16::to_float(f16::from_float(65520.0f))));
  EXPECT_TRUE(std::isinf(bf16::to_float(bf16::from_float(std::numeric_limits<float>::max()))));
}

TEST(DType, NaNStaysNaN) {
  EXPECT_TRUE(std::isnan(f16::to_float(f16::from_float(std::nanf("")))));
  // A NaN whose payload sits in the low bits must not become infinity.
  const std::uint32_t payload = 0x7f800001u;
  float nan_value;
  std::memcpy(&nan_value, &payload, 4);
  EXPECT_TRUE(std::isnan(bf16::to_float(bf16::from_float(nan_value))));
  EXPECT_TRUE(std::isnan(f16::to_float(f16::from_float(nan_value))));
}

}  // namespace
}  // namespace waybill
