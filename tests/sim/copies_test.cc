// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "waybill/random.h"
#include "waybill/simulate.h"

namespace waybill {
namespace {

struct PublishedRow {
  int P, domains;
  double none, rank, gain, network_none, network_rank, network_hierarchical, hierarchical_gain;
};

// Copies per token at E = 256, K = 8, to the digits a design table would print (3 for the first, 2 decimals for the rest).
const PublishedRow kTable[] = {
    {2, 1, 4.00, 0.997, 4.01, 0, 0, 0, 0},
    {4, 1, 6.00, 2.71, 2.21, 0, 0, 0, 0},
    {8, 1, 7.00, 4.63, 1.51, 0, 0, 0, 0},
    {16, 2, 7.50, 6.12, 1.23, 4.00, 3.26, 1.00, 4.01},
    {32, 4, 7.75, 7.04, 1.10, 6.00, 5.45, 2.71, 2.21},
    {64, 8, 7.88, 7.56, 1.04, 7.00, 6.72, 4.63, 1.51},
    {128, 16, 7.94, 7.83, 1.01, 7.50, 7.40, 6.12, 1.23},
    {256, 32, 7.97, 7.97, 1.00, 7.75, 7.75, 7.04, 1.10},
};

TEST(ExchangeCopies, ReproduceTheTableOf256ExpertsTop8) {
  for (const PublishedRow& row : kTable) {
    const ExchangeCopies copies = exchange_copies(256, 8, row.P, row.domains);
    const double half_digit = 0.0050001;
    EXPECT_NEAR(copies.no_dedup, row.none, half_digit) << "P=" << row.P;
    EXPECT_NEAR(copies.rank_dedup, row.rank, row.P == 2 ? 0.0005 : half_digit) << "P=" << row.P;
    EXPECT_NEAR(copies.no_dedup / copies.rank_dedup, row.gain, half_digit) << "P=" << row.P;
    if (row.domains == 1) continue;
    EXPECT_NEAR(copies.network_no_dedup, row.network_none, half_digit) << "P=" << row.P;
    EXPECT_NEAR(copies.network_rank_dedup, row.network_rank, half_digit) << "P=" << row.P;
    EXPECT_NEAR(copies.network_hierarchical, row.network_hierarchical, half_digit) << "P=" << row.P;
    EXPECT_NEAR(copies.network_no_dedup / copies.network_hierarchical, row.hierarchical_gain, half_digit) << "P=" << row.P;
  }
}

TEST(ExchangeCopies, ReproduceTheGainsOfOtherShapes) {
  const auto gain = [](std::int64_t E, std::int64_t K, int P) {
    const ExchangeCopies copies = exchange_copies(E, K, P);
    return copies.no_dedup / copies.rank_dedup;
  };
  EXPECT_NEAR(gain(64, 6, 2), 3.04, 0.005);
  EXPECT_NEAR(gain(64, 6, 8), 1.32, 0.005);
  EXPECT_NEAR(gain(512, 10, 2), 5.00, 0.0051);
  EXPECT_NEAR(gain(512, 10, 8), 1.69, 0.005);
  EXPECT_NEAR(gain(512, 10, 64), 1.06, 0.005);
  EXPECT_NEAR(gain(2304, 36, 2), 18.0, 0.05);
  EXPECT_NEAR(gain(2304, 36, 8), 4.54, 0.005);
  EXPECT_NEAR(gain(2304, 36, 64), 1.29, 0.005);
  EXPECT_NEAR(gain(256, 2, 2), 1.33, 0.005);
}

TEST(ExchangeCopies, EdgesOfTheHitProbability) {
  EXPECT_EQ(group_hit_probability(8, 8, 4), 1.0);  // every expert is visited
  EXPECT_EQ(group_hit_probability(8, 3, 1), 1.0);
  EXPECT_DOUBLE_EQ(group_hit_probability(8, 1, 4), 0.25);
  EXPECT_EQ(exchange_copies(8, 2, 1).rank_dedup, 0.0);  // one rank sends nothing
  EXPECT_THROW(group_hit_probability(10, 2, 4), Error);
  EXPECT_THROW(group_hit_probability(4, 5, 2), Error);
  EXPECT_THROW(exchange_copies(256, 8, 6, 4), Error);
}

// Counting the rows of drawn routes must agree with the closed form: an independent derivation of the same number.
TEST(RoutedRows, CountsOfRandomRoutesApproachTheClosedForm) {
  constexpr int P = 8;
  constexpr std::int64_t T = 2000, E = 64, K = 6;
  constexpr std::uint64_t seed = 20240607;
  std::vector<Route> routes;
  std::vector<RouteView> views;
  for (int p = 0; p < P; ++p) {
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < T; ++t) {
      std::vector<std::int32_t> row;
      for (std::uint64_t draw = 0; row.size() < K; ++draw) {
        const auto id = static_cast<std::int32_t>(random_u64(seed + static_cast<std::uint64_t>(p), static_cast<std::uint64_t>(t) * 1000 + draw) % E);
        if (std::find(row.begin(), row.end(), id) == row.end()) row.push_back(id);
      }
      ids.insert(ids.end(), row.begin(), row.end());
    }
    routes.push_back(Route::from_ids(T, K, E, ids));
  }
  for (const Route& route : routes) views.push_back(route.view());
  const RoutedRows rows = count_routed_rows(views);
  const double expected = static_cast<double>(T) * exchange_copies(E, K, P).rank_dedup;
  EXPECT_NEAR(rows.mean_received(), expected, 0.02 * expected) << "seed " << seed;
  EXPECT_GE(static_cast<double>(rows.max_received()), rows.mean_received());
}

}  // namespace
}  // namespace waybill
