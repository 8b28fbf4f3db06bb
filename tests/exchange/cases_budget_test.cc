// SPDX-License-Identifier: Apache-2.0
// Field case F26 on the CPU: fixed budgets, overflow, recovery, steps with new routes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using Ids = std::vector<std::int32_t>;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// 2 ranks, T = T_max = 64, K = 4, E = 8, receive factor 1.171875.
ExchangeConfig config_of_f26() {
  ExchangeConfig config;
  config.H = 12;
  config.E = 8;
  config.K = 4;
  config.T_max = 64;
  config.mode = ExchangeMode::kCaptured;
  config.receive_factor = 1.171875;
  return config;
}

// Every token takes experts first[t % n] .. first + 3.
Route routes_to(const Ids& first, std::int64_t T = 64) {
  Ids ids;
  for (std::int64_t t = 0; t < T; ++t) {
    for (std::int32_t k = 0; k < 4; ++k) ids.push_back(first[static_cast<std::size_t>(t) % first.size()] + k);
  }
  return Route::from_ids(T, 4, 8, ids);
}
Route balanced() { return routes_to({0, 4}); }
Route all_to_rank_0() { return routes_to({0}); }

Group group_of(std::vector<Route> routes, std::uint64_t seed) {
  Group group;
  group.placement = block_placement(8, 2);
  group.H = 12;
  for (Route& route : routes) {
    group.x.push_back(integer_stamps(static_cast<std::size_t>(route.T() * 12), seed++));
    group.routes.push_back(std::move(route));
  }
  return group;
}

template <class... Routes>
Group make_group(std::uint64_t seed, Routes&&... routes) {
  std::vector<Route> list;
  (list.push_back(std::forward<Routes>(routes)), ...);
  return group_of(std::move(list), seed);
}

TEST(ExchangeCases, F26_BudgetsFollowTheFactor) {
  const ReceiveBudget budget = receive_budget(config_of_f26(), 2);
  EXPECT_EQ(budget.slots, 300);
  EXPECT_EQ(budget.rows, 128);
  EXPECT_EQ(budget.padded_slots, 300);
  ExchangeConfig worst = config_of_f26();
  worst.receive_factor = 0;
  EXPECT_EQ(receive_budget(worst, 2).slots, 512);
  EXPECT_EQ(receive_budget(worst, 2).rows, 128);
  worst.receive_factor = 100;  // never above the worst case
  EXPECT_EQ(receive_budget(worst, 2).slots, 512);
  worst.receive_factor = 0.25;  // 64 slots bound the rows
  EXPECT_EQ(receive_budget(worst, 2).rows, 64);
  worst.alignment = 32;
  EXPECT_EQ(receive_budget(worst, 2).padded_slots, (64 + 31 * 4) / 32 * 32);
}

TEST(ExchangeCases, F26_CapturedModeWithoutTMaxIsRefused) {
  ExchangeConfig config = config_of_f26();
  config.T_max = 0;
  const auto texts = errors_of_ranks(2, [&](Fabric& fabric) { Exchange exchange(config, block_placement(8, 2), fabric); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("captured mode"), HasSubstr("T_max = 0"))));
}

TEST(ExchangeCases, F26_BalancedFitsAndTheWorstCaseOverflows) {
  run_ranks(2, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(config_of_f26(), block_placement(8, 2), fabric);
    // The consumer's buffer: 300 slots and a guard.
    const std::int64_t guard = 64;
    Floats y(static_cast<std::size_t>((300 + guard) * 12), -3.0f);
    const auto run = [&](const Group& group) {
      const DispatchHandle handle = exchange.plan(group.routes[p]);
      Tensor rows;
      exchange.dispatch(handle, to_tensor(group.x[p], group.routes[p].T(), 12, DType::kF32), rows);
      permute(handle.layout, rows, TensorView::of(y.data(), {handle.layout.S_padded(), 12}));
      for (std::size_t i = 300 * 12; i < y.size(); ++i) EXPECT_EQ(y[i], -3.0f);
      Tensor z(DType::kF32, {handle.layout.R(), 12}), out = to_tensor(Floats(group.x[p].size(), 5.0f), group.routes[p].T(), 12, DType::kF32);
      unpermute_reduce(handle.layout, TensorView::of(y.data(), {handle.layout.S_padded(), 12}), true, z);
      exchange.combine(handle, z, out);
      if (handle.valid)
        expect_factor(group, p, to_floats(out));
      else
        EXPECT_THAT(to_floats(out), Each(0.0f));
      Floats d_weights(static_cast<std::size_t>(group.routes[p].T() * 4), 9.0f);
      exchange.return_slot_values(handle, handle.layout.slot_weight.data(), d_weights.data());
      EXPECT_THAT(d_weights, Each(handle.valid ? 1.0f : 0.0f));
      return handle;
    };
    const Group good = make_group(1, balanced(), balanced());
    DispatchHandle handle = run(good);
    EXPECT_TRUE(handle.valid);
    EXPECT_EQ(handle.layout.S(), 256);
    EXPECT_EQ(exchange.status().flags, kStatusOk);

    handle = run(make_group(2, all_to_rank_0(), all_to_rank_0()));
    EXPECT_FALSE(handle.valid);  // on both ranks
    EXPECT_EQ(handle.layout.S(), 0);
    EXPECT_EQ(handle.layout.R(), 0);
    EXPECT_EQ(handle.max_slot_demand, 512);
    EXPECT_EQ(handle.max_row_demand, 128);
    const auto overflowed = [&] {
      if (p == 1) return exchange.status().flags == kStatusOk;
      const StatusWord& status = exchange.status();
      EXPECT_EQ(status.flags, kStatusSlotOverflow);
      EXPECT_EQ(status.slot_demand, 512);
      EXPECT_EQ(status.slot_capacity, 300);
      EXPECT_EQ(status.row_demand, 128);
      EXPECT_EQ(status.row_capacity, 128);
      EXPECT_EQ(describe(status), "receive overflow: slots 512 of 300, rows 128 of 128");
      return status.overflowed();
    };
    EXPECT_TRUE(overflowed());
    EXPECT_TRUE(run(good).valid);  // the step is right, the word stays
    EXPECT_TRUE(overflowed());
    exchange.status().clear();
    EXPECT_TRUE(run(good).valid);
    EXPECT_EQ(exchange.status().flags, kStatusOk);
  });
}

TEST(ExchangeCases, F26_RowsOverflowTooAndBothDemandsAreExact) {
  ExchangeConfig config = config_of_f26();
  config.receive_factor = 0.25;  // 64 slots, 64 rows
  run_ranks(2, [&](Fabric& fabric) {
    Exchange exchange(config, block_placement(8, 2), fabric);
    Ids ids(256, -1);
    for (std::size_t t = 0; t < 64; ++t) ids[t * 4] = 5;  // one slot a token on rank 1: 128 rows and slots
    EXPECT_FALSE(exchange.plan(Route::from_ids(64, 4, 8, ids)).valid);
    if (fabric.rank() == 1) {
      EXPECT_EQ(exchange.status().flags, kStatusSlotOverflow | kStatusRowOverflow);
      EXPECT_EQ(describe(exchange.status()), "receive overflow: slots 128 of 64, rows 128 of 64");
    }
  });
}

TEST(ExchangeCases, F26_ExactlyFullFits) {
  run_ranks(2, [&](Fabric& fabric) {
    ExchangeConfig config = config_of_f26();
    config.receive_factor = 1.0;  // 256 slots
    Exchange exchange(config, block_placement(8, 2), fabric);
    const DispatchHandle handle = exchange.plan(balanced());
    EXPECT_TRUE(handle.valid);
    EXPECT_EQ(handle.layout.S(), exchange.budget().slots);
    // One slot more on rank 0 does not fit.
    Ids ids;
    for (std::int32_t t = 0; t < 64; ++t) {
      for (std::int32_t k = 0; k < 4; ++k) ids.push_back((t % 2) * 4 + k);
    }
    if (fabric.rank() == 0) ids[7] = 0;  // token 1: 4, 5, 6, 0
    EXPECT_FALSE(exchange.plan(Route::from_ids(64, 4, 8, ids)).valid);
  });
}

// 12 steps in captured mode with new x and routes each: bit-equal to an eager exchange on the same inputs.
TEST(ExchangeCases, F26_StepsWithNewRoutesEqualEager) {
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    run_ranks(2, [&](Fabric& fabric) {
      const auto p = static_cast<std::size_t>(fabric.rank());
      ExchangeConfig captured = config_of_f26(), eager = config_of_f26();
      captured.receive_factor = 0;
      captured.combine_wire = eager.combine_wire = wire;
      eager.mode = ExchangeMode::kEager;
      Exchange replay(captured, block_placement(8, 2), fabric), fresh(eager, block_placement(8, 2), fabric);
      std::set<std::string> texts;
      Tensor rows;
      const void* memory = nullptr;
      for (std::uint64_t step = 0; step < 12; ++step) {
        Group group;
        switch (step % 5) {
          case 0:
            group = make_group(step, balanced(), balanced());
            break;
          case 1:
            group = make_group(step, random_route(64, 4, 8, {.seed = step, .drop = 0.5}), routes_to({0, 0, 4}));
            break;
          case 2:
            group = make_group(step, Route(0, 4, 8), balanced());
            break;
          case 3:
            group = make_group(step, routes_to({0}), routes_to({0}));
            break;  // expert 0 in every row, the rest on its rank
          default:
            group = make_group(step, Route(64, 4, 8), Route(64, 4, 8));
            break;
        }
        group.x[p] = normal_values(group.x[p].size(), step * 2 + p);
        const RunOptions options{.weighted = true};
        const RankResult a = run_rank(replay, group, p, options), b = run_rank(fresh, group, p, options);
        EXPECT_TRUE(a.handle.valid);
        EXPECT_TRUE(same_bits(a.out, b.out)) << "step " << step;
        EXPECT_TRUE(same_bits(a.rows, b.rows)) << "step " << step;
        EXPECT_TRUE(same_bits(a.d_weights, b.d_weights)) << "step " << step;
        if (step % 5 == 4) {
          EXPECT_EQ(a.handle.layout.S(), 0);
          EXPECT_EQ(a.handle.layout.R(), 0);
          EXPECT_THAT(a.out, Each(0.0f));
        }
        // One memory for the received rows at every step.
        replay.dispatch(a.handle, to_tensor(group.x[p], group.routes[p].T(), 12, DType::kF32), rows);
        if (step == 0) memory = rows.view().data;
        EXPECT_EQ(rows.view().data, memory);
      }
    });
  }
}

TEST(ExchangeCases, F26_EagerIgnoresTheFactorAndSizesExactly) {
  ExchangeConfig config = config_of_f26();
  config.mode = ExchangeMode::kEager;
  const Group group = make_group(4, all_to_rank_0(), all_to_rank_0());
  const auto results = run_group(group, config);
  EXPECT_TRUE(results[0].handle.valid);
  EXPECT_EQ(results[0].handle.layout.S(), 512);
  EXPECT_EQ(results[1].handle.layout.S(), 0);
  for (std::size_t p = 0; p < 2; ++p) expect_factor(group, p, results[p].out);
}

}  // namespace
}  // namespace waybill
