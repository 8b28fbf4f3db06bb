// SPDX-License-Identifier: Apache-2.0
#include "ops/model/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "waybill/random.h"

namespace waybill {
namespace {

WB_SIMD_INLINE void exp_and_sum_body(const float* x, float* y, std::int64_t n, float* total) {
  using namespace simd;
  Floats lanes{};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats e = exp(load(x + i));
    lanes += e;
    store(y + i, e);
  }
  *total = sum(lanes);
}
WB_SIMD_KERNEL(exp_and_sum, (const float* x, float* y, std::int64_t n, float* total), (x, y, n, total))

TEST(Simd, ExpIsWithinTwoUlpOverItsRange) {
  std::vector<float> x, y;
  for (double v = -87.0; v <= 88.0; v += 0.00173) x.push_back(static_cast<float>(v));
  x.resize((x.size() + 15) / 16 * 16, 0.0f);
  y.resize(x.size());
  float total = 0;
  exp_and_sum(x.data(), y.data(), static_cast<std::int64_t>(x.size()), &total);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    ASSERT_NEAR(y[i], exact, 2 * exact * std::numeric_limits<float>::epsilon()) << "x = " << x[i];
  }
}

TEST(Simd, ExpOfMinusInfinityIsExactlyZeroAndNanStays) {
  std::vector<float> x(16, -std::numeric_limits<float>::infinity()), y(16, 1.0f);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[4] = -1e30f;
  x[5] = 0.0f;
  float total = 0;
  exp_and_sum(x.data(), y.data(), 16, &total);
  for (std::size_t i = 0; i < 16; ++i) {
    if (i != 3 && i != 5) {
      EXPECT_EQ(y[i], 0.0f) << i;
    }
  }
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_EQ(y[5], 1.0f);
}

#if defined(__x86_64__)
TEST(Simd, EveryInstructionSetGivesTheSameBits) {
  std::vector<float> x(4096), base(x.size()), wide(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 10 * random_normal(7, i);
  const auto n = static_cast<std::int64_t>(x.size());
  float base_total = 0, wide_total = 0;
  exp_and_sum_base(x.data(), base.data(), n, &base_total);
  if (simd::level() >= simd::Level::kAvx2) {
    exp_and_sum_avx2(x.data(), wide.data(), n, &wide_total);
    EXPECT_EQ(base, wide);
    EXPECT_EQ(base_total, wide_total);
  }
  if (simd::level() >= simd::Level::kAvx512) {
    exp_and_sum_avx512(x.data(), wide.data(), n, &wide_total);
    EXPECT_EQ(base, wide);
    EXPECT_EQ(base_total, wide_total);
  }
  EXPECT_GT(base_total, 0.0f);
}
#endif

}  // namespace
}  // namespace waybill
