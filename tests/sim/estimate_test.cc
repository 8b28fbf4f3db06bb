// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "waybill/simulate.h"

namespace waybill {
namespace {

TEST(EstimateExchange, FloorsOfTwoRanksAtFullWidth) {
  ClusterSpec cluster;
  cluster.P = 2;
  ExchangeShape shape;  // T 4096, H 7168, E 256, K 8, bf16
  const ExchangeEstimate bf16 = estimate_exchange(cluster, shape, DedupKind::kRank);
  EXPECT_NEAR(bf16.rows_sent, 4082, 2);
  EXPECT_NEAR(bf16.link_bytes, 58.5e6, 0.05e6);
  EXPECT_NEAR(bf16.time_us(), 161, 0.5);
  EXPECT_STREQ(bf16.bound(), "link");
  shape.row_bytes = 7168 + 4 * 7168 / 128;  // fp8 with one fp32 scale per 128 values
  const ExchangeEstimate fp8 = estimate_exchange(cluster, shape, DedupKind::kRank);
  EXPECT_NEAR(fp8.link_bytes, 30.2e6, 0.05e6);
  EXPECT_NEAR(fp8.time_us(), 83, 0.5);
  shape.row_bytes = 0;
  shape.T = 8192;
  EXPECT_NEAR(estimate_exchange(cluster, shape, DedupKind::kRank).time_us(), 322, 1.5);
  EXPECT_NEAR(estimate_exchange(cluster, shape, DedupKind::kNone).time_us(), 1290, 5);
}

TEST(EstimateExchange, HierarchyMovesBytesFromTheNetworkToTheLinks) {
  ClusterSpec cluster;
  cluster.P = 64;
  cluster.num_domains = 8;
  const ExchangeEstimate rank = estimate_exchange(cluster, {}, DedupKind::kRank);
  const ExchangeEstimate hierarchical = estimate_exchange(cluster, {}, DedupKind::kHierarchical);
  EXPECT_LT(hierarchical.network_bytes, rank.network_bytes);
  EXPECT_GT(hierarchical.link_bytes, rank.link_bytes);
  EXPECT_STREQ(rank.bound(), "network");
  EXPECT_NEAR(rank.network_us / hierarchical.network_us, 6.72 / 4.63, 0.005);
}

TEST(EstimateExchange, RefusesBandwidthsAndSizesThatMeanNothing) {
  ClusterSpec cluster;
  cluster.link_gbps = 0;
  EXPECT_THROW(estimate_exchange(cluster, {}, DedupKind::kRank), Error);
  EXPECT_THROW(estimate_exchange({}, {.T = -1}, DedupKind::kRank), Error);
}

// Worked example: two ranks, two experts each. Rank 0: tokens {0,2} {0,1}; rank 1: token {0,3}.
TEST(RoutedRows, CountEachTokenOncePerRank) {
  const Route a = Route::from_ids(2, 2, 4, std::vector<std::int32_t>{0, 2, 0, 1});
  const Route b = Route::from_ids(1, 2, 4, std::vector<std::int32_t>{0, 3});
  const RoutedRows rows = count_routed_rows({a.view(), b.view()});
  EXPECT_EQ(rows.received, (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(rows.sent, (std::vector<std::int64_t>{1, 1}));
}

}  // namespace
}  // namespace waybill
