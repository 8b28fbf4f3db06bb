// SPDX-License-Identifier: Apache-2.0
// Field cases about ranks: F17 (an empty rank), F18 (ragged T).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using Ids = std::vector<std::int32_t>;
using testing::Each;

// Every token of every rank goes to experts 0..5 of 24 (or 12 with 2 ranks).
Group group_of_f17(const std::vector<std::int64_t>& T) {
  Group group;
  const auto P = static_cast<std::int64_t>(T.size());
  group.placement = block_placement(6 * P, static_cast<int>(P));
  group.H = 16;
  for (std::size_t p = 0; p < T.size(); ++p) {
    Ids ids;
    for (std::int64_t t = 0; t < T[p]; ++t) ids.insert(ids.end(), {0, 1, 2, 3, 4, 5});
    group.routes.push_back(Route::from_ids(T[p], 6, 6 * P, ids));
    group.x.push_back(integer_stamps(static_cast<std::size_t>(T[p] * group.H), p + 5));
  }
  return group;
}

TEST(ExchangeCases, F17_ARankWithoutTokensTakesPart) {
  const Group group = group_of_f17({0, 4, 4, 4});
  const auto start = std::chrono::steady_clock::now();
  const auto results = run_group(group, group.config());
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10);  // the timeout is 60 s
  EXPECT_EQ(results[0].handle.layout.S(), 72);
  EXPECT_THAT(results[0].handle.layout.expert_counts, Each(12));
  EXPECT_EQ(results[0].handle.layout.R(), 12);
  EXPECT_EQ(results[0].out.size(), 0u);
  for (std::size_t p = 1; p < 4; ++p) {
    expect_factor(group, p, results[p].out);
    EXPECT_EQ(results[p].handle.layout.S(), 0);  // receives nothing, and takes part all the same
  }
  const Group two = group_of_f17({0, 4});
  const auto two_results = run_group(two, two.config());
  EXPECT_EQ(two_results[0].handle.layout.S(), 24);
  EXPECT_EQ(two_results[0].handle.layout.R(), 4);
  expect_factor(two, 1, two_results[1].out);
}

TEST(ExchangeCases, F17_TheEmptyRankMovesOverTenSteps) {
  run_ranks(4, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(group_of_f17({4, 4, 4, 4}).config(), block_placement(24, 4), fabric);
    for (std::size_t step = 0; step < 10; ++step) {
      std::vector<std::int64_t> T(4, 4);
      T[step % 4] = 0;
      const Group group = group_of_f17(T);
      const RankResult result = run_rank(exchange, group, p, {});
      expect_factor(group, p, result.out);
      EXPECT_EQ(result.handle.layout.S(), p == 0 ? 72 : 0);
    }
  });
}

TEST(ExchangeCases, F17_NoTokensAnywhereIsANoOp) {
  const Group group = group_of_f17({0, 0, 0, 0});
  for (const RankResult& result : run_group(group, group.config())) {
    EXPECT_EQ(result.handle.layout.R(), 0);
    EXPECT_EQ(result.handle.layout.S(), 0);
    EXPECT_TRUE(result.handle.valid);
    EXPECT_EQ(result.out.size(), 0u);
    EXPECT_EQ(result.d_weights.size(), 0u);
  }
}

constexpr std::int64_t kHidden = 2048;  // H of F18

Group group_of_f18(const std::vector<std::int64_t>& T, RandomRoute options, bool integers) {
  options.unit_weights = true;
  return random_group(T, 8, 32, kHidden, options, integers);
}

ExchangeConfig config_of_f18(const Group& group, CombineWire wire) {
  ExchangeConfig config = group.config();
  config.combine_wire = wire;
  config.alignment = 32;
  return config;
}

const RunOptions kBf16{.x_dtype = DType::kBF16, .out_dtype = DType::kBF16};

TEST(ExchangeCases, F18_RaggedTokensCombineExactly) {
  const Group group = group_of_f18({1000, 16, 512, 2048}, {.seed = 18}, true);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    const auto results = run_group(group, config_of_f18(group, wire), kBf16);
    std::int64_t tokens = 0, slots = 0;
    for (std::size_t p = 0; p < 4; ++p) {
      tokens += group.routes[p].T();
      for (const std::int32_t count : results[p].handle.layout.expert_counts) slots += count;
      expect_factor(group, p, results[p].out);  // 8 everywhere
      EXPECT_EQ(results[p].out.size(), static_cast<std::size_t>(group.routes[p].T() * kHidden));
    }
    EXPECT_EQ(tokens, 3576);
    EXPECT_EQ(slots, 28608);
  }
}

// Received rows and weights equal those of inputs padded with zeros to the largest T (the padding rows have no route).
TEST(ExchangeCases, F18_RaggedEqualsPadded) {
  const Group group = group_of_f18({1000, 16, 512, 2048}, {.seed = 19}, false);
  Group padded;
  padded.placement = group.placement;
  padded.H = group.H;
  for (std::size_t p = 0; p < 4; ++p) {
    const RouteView& from = group.routes[p].view();
    Route to(2048, 8, 32);
    for (std::int64_t i = 0; i < from.T * 8; ++i) {
      to.view().set_id(i / 8, i % 8, from.id(i / 8, i % 8));
      to.view().weights[i] = from.weights[i];
    }
    to.recount();
    padded.routes.push_back(std::move(to));
    padded.x.push_back(group.x[p]);
    padded.x.back().resize(2048 * kHidden, 0.0f);
  }
  const auto ragged_run = run_group(group, config_of_f18(group, CombineWire::kF32), kBf16);
  const auto padded_run = run_group(padded, config_of_f18(group, CombineWire::kF32), kBf16);
  for (std::size_t p = 0; p < 4; ++p) {
    EXPECT_TRUE(same_bits(ragged_run[p].rows, padded_run[p].rows));
    EXPECT_TRUE(same_bits(ragged_run[p].handle.layout.slot_weight, padded_run[p].handle.layout.slot_weight));
    Floats head = padded_run[p].out;
    head.resize(ragged_run[p].out.size());
    EXPECT_TRUE(same_bits(ragged_run[p].out, head));
  }
}

TEST(ExchangeCases, F18_MaskedSlotsLowerTheFactor) {
  const Group group = group_of_f18({1000, 16, 512, 2048}, {.seed = 20, .drop = 0.4}, true);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    const auto results = run_group(group, config_of_f18(group, wire), kBf16);
    for (std::size_t p = 0; p < 4; ++p) expect_factor(group, p, results[p].out);
  }
}

// Arbitrary x: sums of identity experts against an fp64 sum, with the bounds of the wire and of the bf16 output.
TEST(ExchangeCases, F18_TheWireBoundHoldsOnArbitraryValues) {
  const Group group = group_of_f18({200, 16, 100, 400}, {.seed = 21}, false);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    const auto results = run_group(group, config_of_f18(group, wire), kBf16);
    double worst = 0;
    for (std::size_t p = 0; p < 4; ++p) {
      for (std::size_t i = 0; i < results[p].out.size(); ++i) {
        const double x = bf16(group.x[p][i]), exact = 8 * x;
        double bound = 8 * std::exp2(-23) * 8 * std::fabs(x) + std::exp2(-8) * std::fabs(exact);
        if (wire == CombineWire::kBF16) bound += std::exp2(-8) * 8 * std::fabs(x);  // sum over ranks of |z_p| = 8 |x|
        const double error = std::fabs(results[p].out[i] - exact);
        ASSERT_LE(error, bound);
        const float once = bf16(static_cast<float>(exact));
        ASSERT_TRUE(wire == CombineWire::kBF16 || results[p].out[i] == once);  // rounded once
        worst = std::max(worst, error);
      }
    }
    EXPECT_EQ(worst > 0, wire == CombineWire::kBF16);  // 8 * bf16 is a bf16: only the wire can add an error
  }
}

TEST(ExchangeCases, F18_OddRouteBytesAreLegal) {
  const Group group = random_group({5, 5}, 2, 8, 16, {.seed = 22, .unit_weights = true}, true);
  const auto results = run_group(group, group.config());
  for (std::size_t p = 0; p < 2; ++p) {
    expect_factor(group, p, results[p].out);
    EXPECT_EQ(results[p].bytes.compact_route, 20);
    EXPECT_EQ(group.routes[p].view().id_dtype, DType::kI16);
  }
  for (const std::int64_t T : {4, 6, 7, 8, 12, 16}) {
    const Group other = random_group({T, T}, 2, 8, 16, {.seed = 23, .unit_weights = true}, true);
    const auto other_results = run_group(other, other.config());
    for (std::size_t p = 0; p < 2; ++p) expect_factor(other, p, other_results[p].out);
  }
}

TEST(ExchangeCases, F18_WeightsMakeTheRoundTripBitForBit) {
  const Group group = random_group({100, 16, 51, 204}, 8, 32, 8, {.seed = 24, .drop = 0.1}, false);
  const auto results = run_group(group, group.config());
  for (std::size_t p = 0; p < 4; ++p) {
    const RouteView& route = group.routes[p].view();
    EXPECT_TRUE(same_bits(results[p].d_weights, Floats(route.weights, route.weights + route.T * 8)));
  }
}

TEST(ExchangeCases, F18_ASavedHandleReproducesTheBytes) {
  const Group group = group_of_f18({100, 16, 51, 204}, {.seed = 25}, false);
  run_ranks(4, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(config_of_f18(group, CombineWire::kF32), group.placement, fabric);
    const DispatchHandle handle = exchange.plan(group.routes[p]);
    const Tensor x = to_tensor(group.x[p], group.routes[p].T(), kHidden, DType::kBF16);
    Tensor first, second;
    exchange.dispatch(handle, x, first);
    exchange.plan(Route(0, 8, 32));  // other traffic in between
    exchange.dispatch(handle, x, second);
    EXPECT_TRUE(same_bits(to_floats(first), to_floats(second)));
  });
}

TEST(ExchangeCases, F18_GrowingAndEmptyRanksDoNotChangeTheOthers) {
  const std::vector<std::int64_t> T = {100, 16, 51, 204};
  const Group fixed = group_of_f18(T, {.seed = 26}, true);
  const auto reference_run = run_group(fixed, config_of_f18(fixed, CombineWire::kBF16), kBf16);
  run_ranks(4, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(config_of_f18(fixed, CombineWire::kBF16), fixed.placement, fabric);
    for (const std::int64_t grown : {0, 1, 16, 40, 333, 0}) {  // rank 1 grows, and is empty first and last
      std::vector<std::int64_t> step = T;
      step[1] = grown;
      const Group group = group_of_f18(step, {.seed = 26}, true);
      const RankResult result = run_rank(exchange, group, p, kBf16);
      expect_factor(group, p, result.out);
      EXPECT_TRUE(p == 1 || same_bits(result.out, reference_run[p].out));
    }
  });
}

}  // namespace
}  // namespace waybill
