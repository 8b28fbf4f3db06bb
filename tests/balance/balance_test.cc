// SPDX-License-Identifier: Apache-2.0
#include "waybill/balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "waybill/error.h"

namespace waybill {
namespace {

using ::testing::HasSubstr;
using Counts = std::vector<std::int64_t>;

TEST(ExpertBias, MovesByRateTowardsTheMean) {
  std::vector<float> bias{0, 0, 0, 0};
  update_expert_bias(bias, Counts{5, 1, 3, 3}, 0.001f);
  EXPECT_EQ(bias, (std::vector<float>{-0.001f, 0.001f, 0, 0}));
}

TEST(ExpertBias, F07_PaddingCountedAsTokensWouldHaveMovedIt) {
  std::vector<float> right(4, 0.0f), wrong(4, 0.0f);
  update_expert_bias(right, Counts{1, 1, 1, 1}, 0.001f);
  EXPECT_EQ(right, std::vector<float>(4, 0.0f));
  update_expert_bias(wrong, Counts{5, 1, 1, 1}, 0.001f);
  EXPECT_EQ(wrong, (std::vector<float>{-0.001f, 0.001f, 0.001f, 0.001f}));
}

TEST(ExpertBias, ComparesInIntegers) {
  // The mean is 1.5: no float is equal to it by luck, and a load of a third of 2^53 + 1 still compares exactly.
  std::vector<float> bias{0, 0};
  update_expert_bias(bias, Counts{1, 2}, 1.0f);
  EXPECT_EQ(bias, (std::vector<float>{1, -1}));
  bias.assign(3, 0.0f);
  const std::int64_t n = std::int64_t{1} << 60;
  update_expert_bias(bias, Counts{n, n, n + 1}, 1.0f);
  EXPECT_EQ(bias, (std::vector<float>{1, 1, -1}));
}

TEST(ExpertBias, NoTokensNoChange) {
  std::vector<float> bias{0.25f, -0.5f};
  for (const bool subtract : {false, true}) update_expert_bias(bias, Counts{0, 0}, 0.001f, subtract);
  EXPECT_EQ(bias, (std::vector<float>{0.25f, -0.5f}));
}

TEST(ExpertBias, AThousandSmallStepsArrive) {
  std::vector<float> bias{0, 0};
  for (int step = 0; step < 1000; ++step) update_expert_bias(bias, Counts{0, 2}, 1e-3f);
  EXPECT_NEAR(bias[0], 1.0f, 1e-4f);  // bf16 would stop at 0.5
  EXPECT_NEAR(bias[1], -1.0f, 1e-4f);
}

TEST(ExpertBias, SubtractMeanKeepsTheSum) {
  std::vector<float> bias(4, 0.0f);
  update_expert_bias(bias, Counts{9, 1, 1, 1}, 0.1f, true);  // signs -1, 1, 1, 1; mean 0.5
  EXPECT_FLOAT_EQ(bias[0], -0.15f);
  for (std::size_t e = 1; e < 4; ++e) EXPECT_FLOAT_EQ(bias[e], 0.05f);
}

TEST(ExpertBias, RefusesUnequalSizesAndNegativeCounts) {
  std::vector<float> bias{1, 2};
  EXPECT_THROW(update_expert_bias(bias, Counts{1}, 0.1f), Error);
  EXPECT_THROW(update_expert_bias(bias, Counts{1, -1}, 0.1f), Error);
  EXPECT_THROW(update_expert_bias(bias, Counts{1, 2}, INFINITY), Error);
  try {
    update_expert_bias(bias, Counts{INT64_MAX, 1}, 0.1f);
    ADD_FAILURE() << "a sum beyond 2^63 was taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the counts up to entry 1 (1) sum to more than 2^63 - 1"));
  }
  EXPECT_EQ(bias, (std::vector<float>{1, 2}));
}

TEST(LoadStatistics, Imbalance) {
  EXPECT_EQ(load_imbalance(Counts{4, 4, 4, 4}), 1.0);
  EXPECT_EQ(load_imbalance(Counts{8, 0, 0, 0}), 4.0);
  EXPECT_EQ(load_imbalance(Counts{0, 0}), 0.0);
  EXPECT_EQ(load_imbalance(Counts{}), 0.0);
}

TEST(LoadStatistics, Summary) {
  Counts counts;
  for (std::int64_t i = 0; i < 100; ++i) counts.push_back(i);
  const LoadSummary summary = summarise_load(counts);
  EXPECT_EQ(summary.total, 4950);
  EXPECT_EQ(summary.min, 0);
  EXPECT_EQ(summary.max, 99);
  EXPECT_EQ(summary.mean, 49.5);
  EXPECT_EQ(summary.p50, 49);
  EXPECT_EQ(summary.p99, 98);
  EXPECT_EQ(summary.hottest, 99);
  EXPECT_EQ(summary.num_idle, 1);
  EXPECT_NEAR(summarise_load(Counts{3, 3, 3, 3}).entropy, std::log(4.0), 1e-12);
  EXPECT_EQ(summarise_load(Counts{7, 0}).entropy, 0.0);
  EXPECT_EQ(summarise_load(Counts{}).total, 0);
}

TEST(LoadStatistics, TilesOfTheLargestCountDoNotWrap) { EXPECT_EQ(count_row_tiles(Counts{INT64_MAX}, 2), INT64_MAX / 2 + 1); }

TEST(LoadStatistics, F30_TilesFollowTheRowsNotTheHottestExpert) {
  Counts counts(255, 32);
  counts.push_back(4096);
  EXPECT_EQ(count_row_tiles(counts, 128), 287);
  EXPECT_EQ(count_row_tiles_at_max(counts, 128), 8192);
}

TEST(LoadStatistics, F30_AReportStatesRowsPerExpertAndRankRealAndPadded) {
  Counts counts(15, 32);
  counts.push_back(4096);
  const LoadReport report = report_load("W2", counts, block_placement(16, 4), 128);
  EXPECT_EQ(report.experts.min, 32);
  EXPECT_EQ(report.experts.max, 4096);
  EXPECT_EQ(report.ranks.min, 128);
  EXPECT_EQ(report.ranks.max, 4192);
  EXPECT_EQ(report.ranks.hottest, 3);
  EXPECT_EQ(report.real_rows, 4576);
  EXPECT_EQ(report.padded_rows, 15 * 128 + 4096);
  EXPECT_THAT(describe(report), HasSubstr("W2: rows per expert min 32 mean 286.0 max 4096 p50 32 p99 4096"));
  EXPECT_THAT(describe(report), HasSubstr("slowest rank 3; rows 4576 real, 6016 padded"));
}

}  // namespace
}  // namespace waybill
