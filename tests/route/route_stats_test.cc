// SPDX-License-Identifier: Apache-2.0
#include "waybill/route_stats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "route/random_routes.h"
#include "waybill/route_plan.h"

namespace waybill {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(RouteStats, ASmallBatchByHand) {
  Route route = Route::from_ids(4, 2, 4, std::vector<std::int32_t>{0, 1, 0, 2, 0, -1, -1, -1});
  const RouteStats stats = route_stats(route, block_placement(4, 2));
  EXPECT_EQ(stats.num_routes, 5);
  EXPECT_EQ(stats.num_empty_tokens, 1);
  EXPECT_EQ(stats.num_bad_ids, 0);
  EXPECT_THAT(stats.counts, ElementsAre(3, 1, 1, 0));
  EXPECT_EQ(stats.min_count, 0);
  EXPECT_EQ(stats.max_count, 3);
  EXPECT_DOUBLE_EQ(stats.mean_count, 1.25);
  EXPECT_EQ(stats.num_idle_experts, 1);
  EXPECT_NEAR(stats.entropy, -(0.6 * std::log(0.6) + 2 * 0.2 * std::log(0.2)), 1e-12);
  ASSERT_EQ(stats.hottest.size(), 3u);
  EXPECT_EQ(stats.hottest[0].expert, 0);
  EXPECT_EQ(stats.hottest[1].expert, 1);  // ties by id
  EXPECT_EQ(stats.hottest[2].expert, 2);
  EXPECT_THAT(stats.rank_rows, ElementsAre(3, 1));
  EXPECT_THAT(stats.rank_slots, ElementsAre(4, 1));
  EXPECT_DOUBLE_EQ(stats.expert_imbalance(), 3 / 1.25);
  EXPECT_DOUBLE_EQ(stats.rank_imbalance(), 1.6);
  EXPECT_DOUBLE_EQ(stats.dedup_gain(), 1.25);
}

TEST(RouteStats, BadIdsAreCountedApart) {
  Route route(2, 1, 4);
  route.view().set_id(0, 0, 7);
  const RouteStats stats = route_stats(route);
  EXPECT_EQ(stats.num_bad_ids, 1);
  EXPECT_EQ(stats.num_routes, 0);
  EXPECT_EQ(stats.num_empty_tokens, 2);
  EXPECT_EQ(stats.expert_imbalance(), 0);
  EXPECT_EQ(stats.entropy, 0);
}

TEST(RouteStats, RowsAgreeWithThePlan) {
  const Route route = testing_support::random_route(300, 6, 60, {.seed = 11, .drop = 0.2});
  for (const int P : {1, 3, 5, 12}) {
    const RouteStats stats = route_stats(route, block_placement(60, P));
    const RoutePlan plan = make_route_plan(route, block_placement(60, P));
    for (std::size_t p = 0; p < static_cast<std::size_t>(P); ++p) EXPECT_EQ(stats.rank_rows[p], plan.row_offsets[p + 1] - plan.row_offsets[p]);
    EXPECT_EQ(stats.num_routes, plan.num_slots());
  }
}

// notes: gain of rank deduplication for uniform routes, E=256, K=8, P=2: remote copies 0.997 instead of 4.00.
TEST(RouteStats, DeduplicationGainOfUniformRoutesMatchesTheFormula) {
  const Route route = testing_support::random_route(20000, 8, 256, {.seed = 3});
  const RouteStats stats = route_stats(route, block_placement(256, 2));
  EXPECT_NEAR(static_cast<double>(stats.rank_rows[1]) / 20000, 0.997, 0.002);
  EXPECT_NEAR(stats.dedup_gain(), 4.01, 0.02);
}

TEST(RouteStats, PrintsWithFmt) {
  const Route route = Route::from_ids(2, 1, 4, std::vector<std::int32_t>{3, 3});
  const std::string text = fmt::format("{}", route_stats(route, block_placement(4, 2)));
  EXPECT_THAT(text, HasSubstr("2 tokens, top-1 of 4 experts: 2 routes"));
  EXPECT_THAT(text, HasSubstr("hottest experts: 3 (2)"));
  EXPECT_THAT(text, HasSubstr("rank 1: 2 rows, 2 slots"));
}

}  // namespace
}  // namespace waybill
