// SPDX-License-Identifier: Apache-2.0
#include "waybill/workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "waybill/balance.h"
#include "waybill/error.h"

namespace waybill {
namespace {

using ::testing::HasSubstr;
using Counts = std::vector<std::int64_t>;

WorkloadConfig make(Workload workload, std::int64_t T, std::int64_t K, std::int64_t E, std::uint64_t seed = 1, std::int64_t step = 0) {
  WorkloadConfig config;
  config.workload = workload;
  config.T = workload == Workload::kFewRows ? few_rows_tokens(E, K) : T;
  config.K = K;
  config.E = E;
  config.seed = seed;
  config.step = step;
  return config;
}

class EveryWorkload : public ::testing::TestWithParam<int> {
 protected:
  Workload workload() const { return static_cast<Workload>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Loads, EveryWorkload, ::testing::Range(0, kNumWorkloads),
                         [](const auto& suite) { return std::string(short_name(static_cast<Workload>(suite.param))); });

TEST_P(EveryWorkload, F30_RowsAreConservedIdsDistinctAndRoutesTheSameAtAnyP) {
  struct Shape {
    std::int64_t T, K, E;
  };
  for (const Shape& shape : {Shape{512, 8, 256}, Shape{100, 4, 48}, Shape{33, 1, 16}, Shape{20, 8, 8}, Shape{64, 36, 2304}, Shape{0, 2, 8}, Shape{5, 1, 1}}) {
    for (const std::int64_t step : {0, 7}) {
      const WorkloadConfig config = make(workload(), shape.T, shape.K, shape.E, 3, step);
      SCOPED_TRACE(fmt::format("{} T {} K {} E {} step {}", short_name(workload()), config.T, shape.K, shape.E, step));
      const std::vector<std::int32_t> ids = workload_ids(config);
      EXPECT_EQ(ids, workload_ids(config));
      for (const int P : {1, 2, 4, 8, 16}) {
        std::vector<std::int32_t> joined;
        Counts counts(static_cast<std::size_t>(shape.E), 0);
        const std::vector<Route> routes = workload_routes(config, P);
        ASSERT_EQ(routes.size(), static_cast<std::size_t>(P));
        for (const Route& route : routes) {
          validate(route.view());  // ids in range and distinct within a row, counts right
          for (std::int64_t i = 0; i < route.T() * route.K(); ++i) joined.push_back(route.view().id(i / route.K(), i % route.K()));
          for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += route.view().counts[e];
        }
        EXPECT_EQ(joined, ids);
        EXPECT_EQ(counts, workload_counts(config));
        EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), config.T * config.K);
      }
    }
  }
}

TEST_P(EveryWorkload, NamesAreParsed) {
  EXPECT_EQ(parse_workload(short_name(workload())), workload());
  EXPECT_EQ(parse_workload(to_string(workload())), workload());
}

TEST(Workloads, F30_BalancedGivesFourRowsToEveryRank) {
  const WorkloadConfig config = make(Workload::kBalanced, 8, 8, 256);
  const Counts counts = workload_counts(config);
  EXPECT_EQ(rows_per_rank(counts, block_placement(256, 16)), Counts(16, 4));
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 64);
  for (const int P : {1, 2, 4, 8, 16, 32, 64}) {
    EXPECT_EQ(rows_per_rank(counts, block_placement(256, P)), Counts(static_cast<std::size_t>(P), 64 / P)) << P;
  }
}

TEST(Workloads, F30_BalancedCoversAllRanksForOtherExpertCounts) {
  for (const std::int64_t E : {48, 60, 96, 160, 384, 2304}) {
    for (const int P : {2, 4, 8, 16}) {
      if (E % P != 0) continue;
      const Counts rows = rows_per_rank(workload_counts(make(Workload::kBalanced, 16, 1, E)), block_placement(E, P));
      for (const std::int64_t n : rows) EXPECT_GT(n, 0) << "E " << E << " P " << P;
    }
  }
}

TEST(Workloads, SkewsAreWhatTheirNamesSay) {
  const std::int64_t T = 4096, K = 8, E = 256;
  const double mean = static_cast<double>(T * K) / static_cast<double>(E);
  EXPECT_EQ(load_imbalance(workload_counts(make(Workload::kBalanced, T, K, E))), 1.0);

  const LoadSummary zipf = summarise_load(workload_counts(make(Workload::kZipf, T, K, E)));
  EXPECT_GT(static_cast<double>(zipf.max), 8 * mean);
  EXPECT_LT(static_cast<double>(zipf.p50), mean);

  const LoadSummary hot = summarise_load(workload_counts(make(Workload::kHotExpert, T, K, E)));
  EXPECT_EQ(static_cast<double>(hot.max), 10 * mean);
  EXPECT_LT(static_cast<double>(hot.p99), 1.5 * mean);

  EXPECT_EQ(summarise_load(workload_counts(make(Workload::kOneExpert, T, K, E))).max, T);
  EXPECT_EQ(summarise_load(workload_counts(make(Workload::kOneExpert, T, 1, E))).num_idle, E - 1);

  const Counts ranks = rows_per_rank(workload_counts(make(Workload::kHotRank, T, K, E)), block_placement(E, 8));
  EXPECT_NEAR(static_cast<double>(ranks[0]), 0.5 * static_cast<double>(T * K), 0.02 * static_cast<double>(T * K));
  EXPECT_EQ(summarise_load(ranks).hottest, 0);

  const Counts empty = workload_counts(make(Workload::kEmptyExperts, T, K, E));
  EXPECT_GE(summarise_load(empty).num_idle, E / 2 + E / 8);
  for (const int P : {2, 4, 8}) EXPECT_EQ(rows_per_rank(empty, block_placement(E, P)).back(), 0) << P;

  for (const std::int64_t n : workload_counts(make(Workload::kFewRows, 0, K, E))) EXPECT_TRUE(n == 1 || n == 2) << n;
}

TEST(Workloads, SourcesAreRaggedOnlyWhereTheyShouldBe) {
  const std::vector<std::int64_t> ragged = workload_bounds(make(Workload::kRaggedSources, 1000, 2, 16), 8);
  std::set<std::int64_t> sizes;
  for (std::size_t p = 0; p + 1 < ragged.size(); ++p) sizes.insert(ragged[p + 1] - ragged[p]);
  EXPECT_TRUE(sizes.contains(0));
  EXPECT_GT(sizes.size(), 3u);
  EXPECT_EQ(ragged.back(), 1000);
  const std::vector<std::int64_t> even = workload_bounds(make(Workload::kZipf, 1000, 2, 16), 8);
  for (std::size_t p = 0; p + 1 < even.size(); ++p) EXPECT_EQ(even[p + 1] - even[p], 125);
}

TEST(Workloads, SpotsMoveWithTheStepAndSeedsDiffer) {
  std::set<std::int64_t> spots;
  for (std::int64_t step = 0; step < 8; ++step) spots.insert(summarise_load(workload_counts(make(Workload::kMovingHotSpot, 2048, 4, 64, 1, step))).hottest);
  EXPECT_GT(spots.size(), 4u);
  EXPECT_NE(workload_ids(make(Workload::kBurst, 512, 4, 64, 1, 0)), workload_ids(make(Workload::kBurst, 512, 4, 64, 1, 1)));
  EXPECT_NE(workload_ids(make(Workload::kZipf, 512, 4, 64, 1)), workload_ids(make(Workload::kZipf, 512, 4, 64, 2)));
  // A burst: a quarter of the rows name the same K experts.
  const std::vector<std::int32_t> ids = workload_ids(make(Workload::kBurst, 512, 4, 64));
  std::int64_t longest = 0, run = 0;
  for (std::size_t t = 1; t < 512; ++t) {
    run = std::equal(ids.begin() + static_cast<std::ptrdiff_t>(t) * 4, ids.begin() + static_cast<std::ptrdiff_t>(t) * 4 + 4,
                     ids.begin() + static_cast<std::ptrdiff_t>(t) * 4 - 4)
              ? run + 1
              : 0;
    longest = std::max(longest, run);
  }
  EXPECT_EQ(longest, 127);
}

TEST(Workloads, BadSettingsAreRefusedWithTheirValues) {
  EXPECT_THROW(workload_ids(make(Workload::kZipf, 8, 9, 8)), Error);
  EXPECT_THROW(workload_ids(make(Workload::kZipf, -1, 1, 8)), Error);
  WorkloadConfig few = make(Workload::kFewRows, 0, 8, 256);
  few.T = 8192;
  try {
    workload_ids(few);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("W9 needs E <= T * K <= 2 E, got T = 8192, K = 8, E = 256 (T = 48 fits)"));
  }
  try {
    parse_workload("W10");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("W0 (balanced), W1 (zipf)"));
  }
}

}  // namespace
}  // namespace waybill
