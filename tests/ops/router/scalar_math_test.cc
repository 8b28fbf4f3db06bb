// SPDX-License-Identifier: Apache-2.0
// The shared scalar functions against double libm, in units in the last place, over a dense sweep of all floats.
#include "core/scalar_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace waybill {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

double exact_sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
double exact_softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// Largest error over every `step`-th float in [low, high].
template <class Got, class Want>
double worst_ulp(Got got, Want want, float low, float high, std::uint32_t step = 4099) {
  double worst = 0;
  for (std::uint64_t bits = 0; bits < 0x100000000ull; bits += step) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (!(x >= low && x <= high)) continue;
    const double exact = want(static_cast<double>(x));
    const double value = got(x);
    if (exact > 3.4028235e38 && value == kInf) continue;
    int exponent = 0;
    std::frexp(exact, &exponent);
    const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
    const double error = std::abs(value - exact) / ulp;
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

TEST(ScalarMath, FunctionsKeepTheirErrorBounds) {
  EXPECT_LE(worst_ulp([](float x) { return scalar::exp(x); }, [](double x) { return std::exp(x); }, -1e4f, 200.0f), 1);
  EXPECT_LE(worst_ulp([](float x) { return scalar::log(x); }, [](double x) { return std::log(x); }, 1e-45f, 3.4e38f), 1);
  EXPECT_LE(worst_ulp([](float x) { return scalar::log1p_unit(x); }, [](double x) { return std::log1p(x); }, 0.0f, 1.0f), 2);
  EXPECT_LE(worst_ulp([](float x) { return scalar::sigmoid(x); }, exact_sigmoid, -1e4f, 1e4f), 3);
  EXPECT_LE(worst_ulp([](float x) { return scalar::softplus(x); }, exact_softplus, -1e4f, 1e4f), 2);
  EXPECT_LE(worst_ulp([](float x) { return scalar::log_sigmoid(x); }, [](double x) { return -exact_softplus(-x); }, -1e4f, 1e4f), 2);
  EXPECT_LE(worst_ulp([](float x) { return scalar::sqrt_softplus(x); }, [](double x) { return std::sqrt(exact_softplus(x)); }, -1400.0f, 1e4f), 2);
  EXPECT_LE(worst_ulp([](float x) { return scalar::log_sigmoid_slope(x); }, [](double x) { return exact_sigmoid(-x); }, -1e4f, 1e4f), 4);
  EXPECT_LE(
      worst_ulp([](float x) { return scalar::log_sqrt_softplus_slope(x); }, [](double x) { return exact_sigmoid(x) / (2 * exact_softplus(x)); }, -700.0f, 1e4f),
      4);
}

TEST(ScalarMath, DenseSweepAroundZero) {
  EXPECT_LE(worst_ulp([](float x) { return scalar::exp(x); }, [](double x) { return std::exp(x); }, -8.0f, 8.0f, 1009), 1);
  EXPECT_LE(worst_ulp([](float x) { return scalar::sigmoid(x); }, exact_sigmoid, -8.0f, 8.0f, 1009), 3);
}

TEST(ScalarMath, LogOfSqrtSoftplusIsHalfXInTheTail) {
  for (const float x : {-1e4f, -200.0f, -104.0f, -50.0f}) EXPECT_EQ(scalar::log_sqrt_softplus(x), 0.5f * x);
  for (float x = -16.9f; x < 30.0f; x += 0.013f) {
    EXPECT_NEAR(scalar::log_sqrt_softplus(x), 0.5 * std::log(exact_softplus(x)), 2.4e-7 + 2e-7 * std::abs(x)) << x;
  }
}

TEST(ScalarMath, Extremes) {
  EXPECT_EQ(scalar::exp(-kInf), 0.0f);
  EXPECT_EQ(scalar::exp(kInf), kInf);
  EXPECT_EQ(scalar::exp(0.0f), 1.0f);
  EXPECT_EQ(scalar::exp(-104.0f), 0.0f);
  EXPECT_EQ(scalar::exp(-103.9f), std::numeric_limits<float>::denorm_min());
  EXPECT_TRUE(std::isnan(scalar::exp(std::nanf(""))));
  EXPECT_EQ(scalar::log(0.0f), -kInf);
  EXPECT_EQ(scalar::log(1.0f), 0.0f);
  EXPECT_EQ(scalar::log(kInf), kInf);
  EXPECT_TRUE(std::isnan(scalar::log(-1.0f)));
  EXPECT_TRUE(std::isnan(scalar::log(std::nanf(""))));
  EXPECT_EQ(scalar::sigmoid(20.0f), 1.0f);
  EXPECT_EQ(scalar::sigmoid(30.0f), 1.0f);
  EXPECT_EQ(scalar::sigmoid(kInf), 1.0f);
  EXPECT_EQ(scalar::sigmoid(-kInf), 0.0f);
  EXPECT_EQ(scalar::sigmoid(0.0f), 0.5f);
  EXPECT_GT(scalar::sigmoid(-89.0f), 0.0f);
  EXPECT_EQ(scalar::log_sigmoid(-1e4f), -1e4f);
  EXPECT_EQ(scalar::log_sigmoid(-104.0f), -104.0f);
  EXPECT_EQ(scalar::log_sigmoid(30.0f), -static_cast<float>(std::exp(-30.0)));
  EXPECT_GT(scalar::sqrt_softplus(-200.0f), 0.0f);
  EXPECT_EQ(scalar::log_sqrt_softplus_slope(-1e4f), 0.5f);
}

TEST(ScalarMath, OrderKeyOrdersAsFloatsDo) {
  const float values[] = {-std::numeric_limits<float>::max(), -2.0f, -1.0f, -1e-45f, 0.0f, 1e-45f, 1.0f, 2.0f, std::numeric_limits<float>::max()};
  for (std::size_t i = 1; i < std::size(values); ++i) EXPECT_LT(scalar::order_key(values[i - 1]), scalar::order_key(values[i]));
  EXPECT_EQ(scalar::order_key(-0.0f), scalar::order_key(0.0f));
  EXPECT_GT(scalar::order_key(-std::numeric_limits<float>::max()), 0u);
}

}  // namespace
}  // namespace waybill
