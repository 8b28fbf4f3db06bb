// SPDX-License-Identifier: Apache-2.0
#include "waybill/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

TEST(Exchange, EqualsTheReferenceBitForBit) {
  ThreadPool pool(2);
  for (const int P : {1, 2, 3, 4, 8}) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      std::vector<std::int64_t> T;
      for (int p = 0; p < P; ++p) T.push_back((p * 37 + 20) % 61);
      const Group group = random_group(T, 5, 24, 19, {.seed = static_cast<std::uint64_t>(P), .drop = 0.2}, false);
      ExchangeConfig config = group.config();
      config.combine_wire = wire;
      config.alignment = P % 2 == 0 ? 8 : 1;
      config.debug_checks = true;
      const auto results = run_group(group, config, {.weighted = true, .pool = P == 3 ? &pool : nullptr});
      const reference::GroupRoutes views = group.views();
      std::vector<Floats> z;
      for (int p = 0; p < P; ++p) {
        const RankResult& result = results[static_cast<std::size_t>(p)];
        const ReceiveLayout layout = reference::receive_layout(views, p, config.alignment);
        EXPECT_EQ(result.handle.layout.row_offsets, layout.row_offsets);
        EXPECT_EQ(result.handle.layout.expert_offsets, layout.expert_offsets);
        EXPECT_EQ(result.handle.layout.slot_row, layout.slot_row);
        EXPECT_EQ(result.handle.layout.slot_position, layout.slot_position);
        EXPECT_TRUE(same_bits(result.handle.layout.slot_weight, layout.slot_weight));
        const Floats rows = reference::received_rows(views, p, group.x_pointers(), group.H);
        EXPECT_TRUE(same_bits(result.rows, rows));
        z.push_back(reference::unpermute_reduce(layout, reference::permute(layout, rows, group.H), true, group.H));
        EXPECT_TRUE(same_bits(result.z, z.back()));
      }
      for (int p = 0; p < P; ++p) {
        const RankResult& result = results[static_cast<std::size_t>(p)];
        EXPECT_TRUE(same_bits(result.out, reference::combine(views, p, z, group.H, wire))) << "P = " << P << ", rank " << p;
        // Weights went to the experts' ranks and came back unchanged.
        const RouteView& route = group.routes[static_cast<std::size_t>(p)].view();
        EXPECT_TRUE(same_bits(result.d_weights, Floats(route.weights, route.weights + route.T * route.K)));
      }
    }
  }
}

TEST(Exchange, PayloadAndOutputMayBeBf16) {
  const Group group = random_group({30, 7}, 4, 8, 16, {.seed = 8, .unit_weights = true}, true);
  for (const DType out : {DType::kF32, DType::kBF16}) {
    const auto results = run_group(group, group.config(), {.x_dtype = DType::kBF16, .out_dtype = out});
    for (std::size_t p = 0; p < 2; ++p) expect_factor(group, p, results[p].out);
  }
}

TEST(Exchange, RowsMayBeStrided) {
  const std::int64_t H = 6;
  const Route route = random_route(5, 2, 4, {.seed = 3, .unit_weights = true});
  const auto fabric = make_single_fabric();
  ExchangeConfig config;
  config.H = H;
  config.E = 4;
  config.K = 2;
  Exchange exchange(config, block_placement(4, 1), *fabric);
  const Floats wide = integer_stamps(5 * 11, 4);
  TensorView x = TensorView::of(wide.data(), {5, H});
  x.stride[0] = 11;
  const DispatchHandle handle = exchange.plan(route);
  Tensor rows;
  exchange.dispatch(handle, x, rows);
  Floats out_wide(5 * 9, -7.0f);
  TensorView out = TensorView::of(out_wide.data(), {5, H});
  out.stride[0] = 9;
  exchange.combine(handle, rows, out);
  for (std::size_t i = 0; i < out_wide.size(); ++i) EXPECT_EQ(out_wide[i], i % 9 < 6 ? wide[i / 9 * 11 + i % 9] : -7.0f);
}

TEST(Exchange, APlacementTableIsHonouredAndCopied) {
  Group group = random_group({9, 14, 3}, 4, 12, 5, {.seed = 21, .unit_weights = true}, true);
  auto ranks = std::make_unique<std::vector<std::int32_t>>(), locals = std::make_unique<std::vector<std::int32_t>>();
  for (std::int32_t e = 0; e < 12; ++e) {
    ranks->push_back(e % 3);
    locals->push_back(3 - e / 3);
  }
  run_ranks(3, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    auto my_ranks = *ranks, my_locals = *locals;
    Exchange exchange(group.config(), ExpertPlacement{12, 3, my_ranks.data(), my_locals.data()}, fabric);
    std::fill(my_ranks.begin(), my_ranks.end(), 99);
    std::fill(my_locals.begin(), my_locals.end(), 99);
    const RankResult result = run_rank(exchange, group, p, {});
    expect_factor(group, p, result.out);
    std::int64_t slots = 0;  // experts of this rank: 3 * i + p, local id 3 - i
    for (std::size_t local = 0; local < 4; ++local) {
      std::int64_t expected = 0;
      for (const Route& route : group.routes) expected += route.view().counts[3 * (3 - local) + p];
      EXPECT_EQ(result.handle.layout.expert_counts[local], expected);
      slots += expected;
    }
    EXPECT_EQ(result.handle.layout.S(), slots);
  });
}

TEST(Exchange, DifferentConfigsAreOneErrorOnEveryRank) {
  const auto texts_with = [](const auto& change) {
    return errors_of_ranks(3, [&](Fabric& fabric) {
      ExchangeConfig config;
      config.H = 32;
      config.E = 12;
      config.K = 2;
      config.T_max = 16;
      if (fabric.rank() == 2) change(config);
      Exchange exchange(config, block_placement(config.E, 3), fabric);
    });
  };
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.H = 64; }), Each("the ranks of an exchange must have one config: H is 32 on rank 0, but 64 on rank 2"));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.K = 3; }), Each(HasSubstr("K is 2 on rank 0, but 3 on rank 2")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.E = 24; }), Each(HasSubstr("E is 12 on rank 0, but 24 on rank 2")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.combine_wire = CombineWire::kBF16; }), Each(HasSubstr("combine_wire")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.receive_factor = 1.5; }), Each(HasSubstr("receive_factor is 0 on rank 0, but 1.5")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.alignment = 8; }), Each(HasSubstr("alignment")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.T_max = 17; }), Each(HasSubstr("T_max")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.mode = ExchangeMode::kCaptured; }), Each(HasSubstr("mode")));
  EXPECT_THAT(texts_with([](ExchangeConfig& c) { c.debug_checks = true; }), Each(HasSubstr("debug_checks")));
  EXPECT_THAT(texts_with([](ExchangeConfig&) {}), Each(""));
}

TEST(Exchange, DifferentPlacementsAreOneErrorOnEveryRank) {
  const std::vector<std::int32_t> ranks = {0, 1, 0, 1}, locals = {0, 0, 1, 1};
  const auto texts = errors_of_ranks(2, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 8;
    config.E = 4;
    config.K = 1;
    const ExpertPlacement table{4, 2, ranks.data(), locals.data()};
    Exchange exchange(config, fabric.rank() == 0 ? block_placement(4, 2) : table, fabric);
  });
  EXPECT_THAT(texts, Each(HasSubstr("hash of the expert placement")));
}

std::string refusal(const std::function<void(ExchangeConfig&)>& change, int P = 4) {
  ExchangeConfig config;
  config.H = 32;
  config.E = 12;
  config.K = 2;
  change(config);
  try {
    validate(config, P);
  } catch (const Error& error) {
    return error.what();
  }
  return "not refused";
}

TEST(Exchange, BadConfigsAreRefusedWithTheValues) {
  EXPECT_THAT(refusal([](ExchangeConfig&) {}, 5), AllOf(HasSubstr("E = 12"), HasSubstr("P = 5")));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.H = 0; }), HasSubstr("H = 0"));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.K = 13; }), AllOf(HasSubstr("E = 12"), HasSubstr("K = 13")));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.alignment = 0; }), HasSubstr("alignment"));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.T_max = -1; }), HasSubstr("-1"));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.receive_factor = -0.5; }), HasSubstr("-0.5"));
  EXPECT_THAT(refusal([](ExchangeConfig& c) { c.receive_factor = std::numeric_limits<double>::infinity(); }), HasSubstr("inf"));
  EXPECT_EQ(refusal([](ExchangeConfig&) {}), "not refused");
}

TEST(Exchange, BadIdsAreRefusedOnEveryRankInDebugModeNamingRankRowAndSlot) {
  const auto texts = errors_of_ranks(3, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 8;
    config.E = 6;
    config.K = 2;
    config.debug_checks = true;
    Exchange exchange(config, block_placement(6, 3), fabric);
    Route route = random_route(4, 2, 6, {.seed = 2});
    if (fabric.rank() == 1) route.view().set_id(3, 1, 8);
    exchange.plan(route);
  });
  EXPECT_THAT(texts, Each("plan refused by rank 1: route row 3, slot 1: id 8 is outside [-1, 6)"));
}

TEST(Exchange, TooManyTokensAreRefusedOnEveryRank) {
  const auto texts = errors_of_ranks(2, [&](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 8;
    config.E = 6;
    config.K = 2;
    config.T_max = 4;
    config.mode = ExchangeMode::kCaptured;
    Exchange exchange(config, block_placement(6, 2), fabric);
    exchange.plan(random_route(4, 2, 6, {.seed = 2}));
    exchange.plan(random_route(fabric.rank() == 0 ? 5 : 4, 2, 6, {.seed = 2}));
  });
  EXPECT_THAT(texts, Each("plan refused by rank 0: T = 5 tokens exceed T_max = 4"));
}

TEST(Exchange, TensorsOfAnotherShapeAreRefused) {
  const auto fabric = make_single_fabric();
  ExchangeConfig config;
  config.H = 8;
  config.E = 6;
  config.K = 2;
  Exchange exchange(config, block_placement(6, 1), *fabric);
  const DispatchHandle handle = exchange.plan(random_route(4, 2, 6, {.seed = 2}));
  Tensor rows, x(DType::kF32, {4, 7}), ids(DType::kI32, {4, 8}), out(DType::kF32, {4, 8});
  EXPECT_THROW(exchange.dispatch(handle, x, rows), Error);
  EXPECT_THROW(exchange.dispatch(handle, ids, rows), Error);
  EXPECT_THROW(exchange.combine(handle, x, out), Error);
  EXPECT_THROW(exchange.plan(random_route(4, 3, 6, {.seed = 2})), Error);
  EXPECT_THROW(exchange.plan(random_route(4, 2, 7, {.seed = 2})), Error);
}

TEST(Exchange, PhasesAreTimed) {
  const Group group = random_group({40, 40}, 4, 8, 64, {.seed = 8}, true);
  for (const RankResult& result : run_group(group, group.config())) {
    for (const Phase phase : {Phase::kPlan, Phase::kDispatch, Phase::kCombine}) {
      const auto i = static_cast<std::size_t>(phase);
      EXPECT_GT(result.times.seconds[i], 0) << to_string(phase);
      EXPECT_GT(result.times.wait_seconds[i], 0) << to_string(phase);
      EXPECT_LE(result.times.wait_seconds[i], result.times.seconds[i]) << to_string(phase);
    }
  }
}

TEST(Exchange, ResultsDoNotDependOnThePool) {
  const Group group = random_group({300, 170}, 6, 16, 33, {.seed = 13}, false);
  ExchangeConfig config = group.config();
  config.combine_wire = CombineWire::kBF16;
  const auto alone = run_group(group, config, {.x_dtype = DType::kBF16, .out_dtype = DType::kBF16, .weighted = true});
  ThreadPool pool(3);
  const auto pooled = run_group(group, config, {.x_dtype = DType::kBF16, .out_dtype = DType::kBF16, .weighted = true, .pool = &pool});
  for (std::size_t p = 0; p < 2; ++p) {
    EXPECT_TRUE(same_bits(alone[p].out, pooled[p].out));
    EXPECT_TRUE(same_bits(alone[p].z, pooled[p].z));
  }
}

// The same tokens give the same bits wherever they live: with a bf16 wire the own rank's partial is rounded too.
TEST(Exchange, ATokensResultDoesNotDependOnItsRank) {
  const Group group = random_group({64, 0, 0, 0}, 6, 16, 24, {.seed = 31}, false);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    Floats first;
    for (std::size_t home = 0; home < 4; ++home) {
      Group moved;
      moved.placement = group.placement;
      moved.H = group.H;
      for (std::size_t p = 0; p < 4; ++p) {
        moved.routes.push_back(Route::copy_of(group.routes[p == home ? 0 : 1]));
        moved.x.push_back(group.x[p == home ? 0 : 1]);
      }
      ExchangeConfig config = moved.config();
      config.combine_wire = wire;
      const auto results = run_group(moved, config, {.weighted = true});
      if (home == 0) first = results[0].out;
      EXPECT_TRUE(same_bits(results[home].out, first)) << "home " << home;
    }
  }
}

}  // namespace
}  // namespace waybill
