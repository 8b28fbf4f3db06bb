// SPDX-License-Identifier: Apache-2.0
// The two-level exchange on virtual nodes: the same rows as the flat one, fewer of them between nodes, sums in the documented order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "exchange/counting_fabric.h"
#include "exchange/group.h"
#include "exchange/node_plan.h"

namespace waybill {
namespace {

using namespace testing_support;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// Ranks on nodes as given; node numbers in order of first ranks.
std::vector<RankResult> run_on_nodes(const Group& group, const ExchangeConfig& config, const std::vector<int>& node_of, const RunOptions& options = {}) {
  std::vector<RankResult> results(group.routes.size());
  run_ranks(group.placement.P, [&](Fabric& inner) {
    CountingFabric fabric(inner, node_of);
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(config, group.placement, fabric, options.pool);
    fabric.sent = fabric.sent_between_nodes = 0;
    results[p] = run_rank(exchange, group, p, options);
    EXPECT_EQ(exchange.bytes().total(), fabric.sent);
    EXPECT_EQ(exchange.bytes().between_nodes, fabric.sent_between_nodes);
    EXPECT_EQ(exchange.bytes().payload, exchange.bytes().rows * group.H * static_cast<std::int64_t>(size_bytes(options.x_dtype)));
    EXPECT_EQ(exchange.bytes().within_nodes(), fabric.sent - fabric.sent_between_nodes);
  });
  return results;
}

TEST(NodePlan, AWorkedExample) {
  const NodeMap map(Topology{{7, 7, 3, 3}, {0, 1, 2, 3}});
  EXPECT_THAT(map.node_of, ElementsAre(0, 0, 1, 1));
  EXPECT_EQ(map.gateway(0, 1), 2);
  EXPECT_EQ(map.gateway(3, 0), 1);
  EXPECT_EQ(map.gateway(3, 1), 3);
  const Route route = Route::from_ids(3, 2, 4, std::vector<std::int32_t>{2, 3, 0, 2, 1, 0});
  NodePlan nodes;
  std::vector<std::vector<std::byte>> masks;
  plan_node_rows(make_route_plan(route, block_placement(4, 4)), map, 0, nodes, masks);
  EXPECT_THAT(nodes.send_offsets, ElementsAre(0, 2, 2, 4, 4));
  EXPECT_THAT(nodes.send_token, ElementsAre(1, 2, 0, 1));
  EXPECT_THAT(nodes.token_offsets, ElementsAre(0, 1, 3, 4));
  EXPECT_THAT(nodes.token_rows, ElementsAre(2, 0, 3, 1));
  EXPECT_THAT(masks[0], ElementsAre(std::byte{1}, std::byte{3}));
  EXPECT_THAT(masks[2], ElementsAre(std::byte{3}, std::byte{1}));
  EXPECT_THAT(masks[1], testing::IsEmpty());

  // Rank 2 takes these rows of rank 0 in, and one of its own that only rank 3 needs.
  const std::byte own{2};
  plan_forwards({2, 0, 1, 0}, {masks[2].data(), nullptr, &own, nullptr}, map, 2, nodes);
  EXPECT_THAT(nodes.arrive_offsets, ElementsAre(0, 2, 2, 3, 3));
  EXPECT_THAT(nodes.forward_offsets, ElementsAre(0, 0, 0, 2, 4));
  EXPECT_THAT(nodes.forward_rows, ElementsAre(0, 1, 0, 2));
  EXPECT_THAT(nodes.row_forward_offsets, ElementsAre(0, 2, 3, 4));
  EXPECT_THAT(nodes.row_forwards, ElementsAre(0, 2, 1, 3));
}

TEST(TwoLevel, EqualsTheReferenceBitForBitOnAnyLayoutOfNodes) {
  const std::vector<std::vector<int>> layouts = {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 1, 0, 2}, {0, 1, 1, 0, 2, 2, 2, 2, 2},
                                                 {0, 0, 0},    {0, 1, 2},    {0}};
  for (const std::vector<int>& node_of : layouts) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      const auto P = static_cast<int>(node_of.size());
      std::vector<std::int64_t> T;
      for (int p = 0; p < P; ++p) T.push_back(p == 2 ? 0 : (p * 37 + 20) % 61);
      const Group group = random_group(T, 5, 36, 19, {.seed = static_cast<std::uint64_t>(P), .drop = 0.2}, false);
      ExchangeConfig config = group.config();
      const auto flat = run_group(group, config, {.weighted = true});
      config.hierarchy = Hierarchy::kTwoLevel;
      config.combine_wire = wire;
      config.debug_checks = true;
      ThreadPool pool(2);
      const auto results = run_on_nodes(group, config, node_of, {.weighted = true, .pool = P == 4 ? &pool : nullptr});
      std::vector<Floats> z;
      for (const RankResult& result : flat) z.push_back(result.z);
      for (std::size_t p = 0; p < results.size(); ++p) {
        EXPECT_TRUE(same_bits(results[p].rows, flat[p].rows)) << "P = " << P << ", rank " << p;
        EXPECT_TRUE(same_bits(results[p].d_weights, flat[p].d_weights));
        EXPECT_EQ(results[p].handle.layout.slot_row, flat[p].handle.layout.slot_row);
        const Floats expected = reference::combine_two_level(group.views(), static_cast<int>(p), node_of, z, group.H, wire);
        EXPECT_TRUE(same_bits(results[p].out, expected)) << "P = " << P << ", rank " << p;
      }
    }
  }
}

RC_GTEST_PROP(TwoLevel, EqualsTheFlatExchangeExactlyOnIntegerStamps, ()) {
  const auto P = *rc::gen::element(1, 2, 3, 4, 6, 8);
  const auto L = *rc::gen::inRange<std::int64_t>(1, 9);
  std::vector<std::int64_t> T;
  std::vector<int> nodes;
  for (int p = 0; p < P; ++p) {
    T.push_back(*rc::gen::element<std::int64_t>(0, 1, 17, 40));
    nodes.push_back(*rc::gen::inRange(0, 3));
  }
  const auto K = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(P * L, 17) + 1);
  const Group group = random_group(T, K, P * L, 5, {.seed = *rc::gen::arbitrary<std::uint32_t>(), .drop = 0.2, .unit_weights = true}, true);
  ExchangeConfig config = group.config();
  config.combine_wire = *rc::gen::element(CombineWire::kF32, CombineWire::kBF16);
  config.mode = *rc::gen::element(ExchangeMode::kEager, ExchangeMode::kCaptured);
  config.T_max = 40;
  const auto flat = run_group(group, config, {.x_dtype = DType::kBF16});
  config.hierarchy = Hierarchy::kTwoLevel;
  const auto results = run_on_nodes(group, config, nodes, {.x_dtype = DType::kBF16});
  for (std::size_t p = 0; p < results.size(); ++p) {
    RC_ASSERT(same_bits(results[p].rows, flat[p].rows));
    RC_ASSERT(results[p].out == flat[p].out);
  }
}

TEST(TwoLevel, FloatsStayWithinTheBoundOfTheFlatExchange) {
  const std::vector<std::int64_t> T = {60, 31, 0, 50, 44, 60, 7, 60};
  const Group group = random_group(T, 8, 64, 24, {.seed = 5}, false);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    ExchangeConfig config = group.config();
    const auto exact = run_group(group, config, {.weighted = true});
    config.hierarchy = Hierarchy::kTwoLevel;
    config.combine_wire = wire;
    const auto results = run_group(group, config, {.weighted = true, .ranks_per_node = 3});  // 3, 3 and 2 ranks
    ASSERT_EQ(results[7].handle.nodes.token_offsets.size(), 61u);
    double largest = 0;
    for (std::size_t p = 0; p < results.size(); ++p) {
      for (std::int64_t t = 0; t < T[p]; ++t) {
        for (std::int64_t h = 0; h < group.H; ++h) {
          // Sum of the ranks' partials' sizes: each is at most the sum of |w x| of its slots.
          double size = 0;
          for (std::int64_t k = 0; k < 8; ++k)
            size += std::abs(static_cast<double>(group.routes[p].view().weights[t * 8 + k]) * group.x[p][static_cast<std::size_t>(t * group.H + h)]);
          const auto i = static_cast<std::size_t>(t * group.H + h);
          const double error = std::abs(static_cast<double>(results[p].out[i]) - exact[p].out[i]);
          const double bound = (wire == CombineWire::kBF16 ? 0x1p-8 : 0.0) * size + 8 * 0x1p-24 * size;
          ASSERT_LE(error, bound) << "rank " << p << ", token " << t << ", column " << h;
          largest = std::max(largest, error);
        }
      }
    }
    EXPECT_GT(largest, 0) << "nothing differed: the two orders were not compared";
  }
}

// The count by hand (distinct remote nodes of every token) and the formula of uniform routing, (N - 1) p(N) rows a token with
// p(n) = 1 - C(E - E/n, K) / C(E, K): 0.997 at N = 2, 2.71 at N = 4.
TEST(TwoLevel, RowsBetweenNodesAreTheDeduplicatedCount) {
  const std::int64_t E = 256, K = 8, T = 1024;
  for (const auto& [P, N, published] : {std::tuple{4, 2, 0.997}, std::tuple{8, 2, 0.997}, std::tuple{8, 4, 2.71}}) {
    const Group group = random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), T), K, E, 1, {.seed = 256}, true);
    ExchangeConfig config = group.config();
    const auto flat = run_group(group, config, {.ranks_per_node = P / N});
    config.hierarchy = Hierarchy::kAuto;
    const auto results = run_group(group, config, {.ranks_per_node = P / N});
    double missed = 1;
    for (std::int64_t k = 0; k < K; ++k) missed *= static_cast<double>(E - E / N - k) / static_cast<double>(E - k);
    const double formula = (N - 1) * (1 - missed);
    EXPECT_NEAR(formula, published, 0.005);
    std::int64_t total = 0;
    for (int p = 0; p < P; ++p) {
      const RouteView& route = group.routes[static_cast<std::size_t>(p)].view();
      std::int64_t expected = 0;
      for (std::int64_t t = 0; t < T; ++t) {
        std::vector<bool> seen(static_cast<std::size_t>(N), false);
        for (std::int64_t k = 0; k < K; ++k) seen[static_cast<std::size_t>(route.id(t, k) / (E / N))] = true;
        seen[static_cast<std::size_t>(p / (P / N))] = false;
        expected += std::count(seen.begin(), seen.end(), true);
      }
      const ExchangeBytes &two = results[static_cast<std::size_t>(p)].bytes, &one = flat[static_cast<std::size_t>(p)].bytes;
      EXPECT_EQ(two.rows_between_nodes, expected) << "P = " << P << ", N = " << N << ", rank " << p;
      EXPECT_LE(two.rows_between_nodes, one.rows_between_nodes);
      EXPECT_TRUE(same_bits(results[static_cast<std::size_t>(p)].out, flat[static_cast<std::size_t>(p)].out));  // integers
      total += two.rows_between_nodes;
    }
    // Standard deviation of a mean over P * T tokens is below sqrt(N) / sqrt(P T) = 0.032.
    EXPECT_NEAR(static_cast<double>(total) / static_cast<double>(P * T), formula, 0.05);
  }
}

TEST(TwoLevel, AutoLooksAtTheNodes) {
  const auto chosen = [](const std::vector<int>& node_of, Hierarchy hierarchy) {
    bool two_level = false;
    run_ranks(static_cast<int>(node_of.size()), [&](Fabric& inner) {
      CountingFabric fabric(inner, node_of);
      ExchangeConfig config;
      config.H = config.K = 1;
      config.E = 12;
      config.hierarchy = hierarchy;
      const Exchange exchange(config, block_placement(12, fabric.size()), fabric);
      if (fabric.rank() == 0) two_level = exchange.two_level();
    });
    return two_level;
  };
  EXPECT_TRUE(chosen({0, 0, 1, 1}, Hierarchy::kAuto));
  EXPECT_FALSE(chosen({0, 0, 0, 0}, Hierarchy::kAuto));
  EXPECT_FALSE(chosen({0, 1, 2, 3}, Hierarchy::kAuto));
  EXPECT_FALSE(chosen({0, 0, 1, 1}, Hierarchy::kFlat));
  EXPECT_TRUE(chosen({0, 0, 0, 0}, Hierarchy::kTwoLevel));
}

TEST(TwoLevel, OverflowAndBadRoutesAreTheSameOnEveryRank) {
  const Group group = random_group({20, 3, 0, 40}, 4, 16, 6, {.seed = 4, .first_expert = 8, .num_experts = 4, .unit_weights = true}, true);
  ExchangeConfig config = group.config();
  config.hierarchy = Hierarchy::kTwoLevel;
  config.mode = ExchangeMode::kCaptured;
  config.T_max = 40;
  config.receive_factor = 1;
  for (const RankResult& result : run_group(group, config, {.ranks_per_node = 2})) {
    EXPECT_FALSE(result.handle.valid);
    EXPECT_EQ(result.handle.max_slot_demand, 252);
    EXPECT_THAT(result.out, Each(0.0f));
  }
  const auto texts = errors_of_ranks(4, [&](Fabric& inner) {
    ExchangeConfig other = group.config();
    if (inner.rank() == 3) other.hierarchy = Hierarchy::kTwoLevel;
    Exchange exchange(other, group.placement, inner);
  });
  EXPECT_THAT(texts, Each(HasSubstr("hierarchy (0 flat, 1 two_level, 2 auto) is 0 on rank 0, but 1 on rank 3")));
  const auto boundaries = errors_of_ranks(4, [&](Fabric& inner) {
    CountingFabric fabric(inner, inner.rank() == 1 ? std::vector<int>{0, 1, 1, 1} : std::vector<int>{0, 0, 1, 1});
    Exchange exchange(group.config(), group.placement, fabric);
  });
  EXPECT_THAT(boundaries, Each(HasSubstr("the hash of the nodes' boundaries")));
}

TEST(TwoLevel, TheThreadsEngineTakesABoundary) {
  std::vector<int> nodes;
  run_ranks(
      5,
      [&](Fabric& fabric) {
        if (fabric.rank() == 4) nodes = fabric.topology().node_of;
      },
      FabricOptions{.ranks_per_node = 2});
  EXPECT_THAT(nodes, ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THROW(run_ranks(
                   2, [](Fabric&) {}, FabricOptions{.ranks_per_node = 3}),
               Error);
}

}  // namespace
}  // namespace waybill
