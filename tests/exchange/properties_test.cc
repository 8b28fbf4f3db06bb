// SPDX-License-Identifier: Apache-2.0
// Properties on random routes: conservation, identity experts, invariance under the number of ranks.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;

struct Shape {
  int P;
  std::int64_t E, K;
  std::vector<std::int64_t> T;
  RandomRoute routes;
};

// Any P that divides E, K from 1 to 36, ragged T with empty ranks, hot experts or ranks, dropped slots.
Shape random_shape() {
  Shape shape;
  shape.P = *rc::gen::element(1, 2, 3, 4, 5, 6, 8);
  const auto L = *rc::gen::inRange<std::int64_t>(1, 13);
  shape.E = L * shape.P;
  shape.K = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(shape.E, 36) + 1);
  for (int p = 0; p < shape.P; ++p) shape.T.push_back(*rc::gen::element<std::int64_t>(0, 1, 5, 17, 40));
  shape.routes.seed = *rc::gen::arbitrary<std::uint32_t>();
  shape.routes.drop = *rc::gen::element(0.0, 0.3, 1.0);
  if (*rc::gen::arbitrary<bool>() && shape.E > shape.K) {  // the last K experts only: hot experts, often one hot rank
    shape.routes.first_expert = shape.E - shape.K;
    shape.routes.num_experts = shape.K;
  }
  return shape;
}

RC_GTEST_PROP(ExchangeProperty, EveryRouteBecomesOneSlotAndEveryRowOneToken, ()) {
  const Shape shape = random_shape();
  const Group group = random_group(shape.T, shape.K, shape.E, 3, shape.routes, false);
  ExchangeConfig config = group.config();
  config.debug_checks = true;
  config.alignment = *rc::gen::element(1, 4, 32);
  const auto results = run_group(group, config);
  std::int64_t slots = 0, rows = 0, routes = 0, sent_rows = 0;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(shape.E), 0), expected(counts);
  for (std::size_t p = 0; p < results.size(); ++p) {
    const ReceiveLayout& layout = results[p].handle.layout;
    slots += layout.S();
    rows += layout.R();
    sent_rows += results[p].handle.plan.num_rows();
    for (std::int64_t e = 0; e < layout.L; ++e) {
      counts[p * static_cast<std::size_t>(layout.L) + static_cast<std::size_t>(e)] += layout.expert_counts[static_cast<std::size_t>(e)];
    }
    const RouteView& route = group.routes[p].view();
    for (std::int64_t e = 0; e < shape.E; ++e) expected[static_cast<std::size_t>(e)] += route.counts[e];
    for (std::int64_t t = 0; t < route.T; ++t) routes += valid_slots(route, t);
    RC_ASSERT(same_bits(results[p].d_weights, Floats(route.weights, route.weights + route.T * route.K)));
  }
  RC_ASSERT(slots == routes);
  RC_ASSERT(rows == sent_rows);
  RC_ASSERT(counts == expected);
}

// combine(dispatch(x)) = K * x to the bit with identity experts and unit weights: fp32 wire, or integer stamps on a bf16 wire.
RC_GTEST_PROP(ExchangeProperty, IdentityExpertsReturnTheNumberOfSlotsTimesTheRow, ()) {
  Shape shape = random_shape();
  shape.routes.unit_weights = true;
  const bool bf16_wire = *rc::gen::arbitrary<bool>();
  if (bf16_wire) shape.K = std::min<std::int64_t>(shape.K, 17);
  if (shape.routes.num_experts > 0) shape.routes.num_experts = shape.E - shape.routes.first_expert;
  const Group group = random_group(shape.T, shape.K, shape.E, 5, shape.routes, true);
  ExchangeConfig config = group.config();
  config.combine_wire = bf16_wire ? CombineWire::kBF16 : CombineWire::kF32;
  const auto results = run_group(group, config, {.x_dtype = DType::kBF16});
  for (std::size_t p = 0; p < results.size(); ++p) {
    const RouteView& route = group.routes[p].view();
    for (std::int64_t t = 0; t < route.T; ++t) {
      for (std::int64_t h = 0; h < 5; ++h) {
        const auto i = static_cast<std::size_t>(t * 5 + h);
        RC_ASSERT(results[p].out[i] == static_cast<float>(valid_slots(route, t)) * group.x[p][i]);
      }
    }
  }
}

// The same batch over 1, 2, 4 and 8 ranks: integer weights and stamps make every order exact, so the bits agree.
RC_GTEST_PROP(ExchangeProperty, OutputsDoNotDependOnTheNumberOfRanks, ()) {
  const auto K = *rc::gen::inRange<std::int64_t>(1, 9);
  const std::int64_t E = 16, T = 40, H = 4;
  const auto seed = *rc::gen::arbitrary<std::uint32_t>();
  Route whole = random_route(T, K, E, {.seed = seed, .drop = 0.2});
  for (std::int64_t i = 0; i < T * K; ++i) {
    if (whole.view().weights[i] != 0.0f) whole.view().weights[i] = static_cast<float>(1 + random_u64(seed, static_cast<std::uint64_t>(i)) % 8);
  }
  const Floats x = integer_stamps(static_cast<std::size_t>(T * H), seed);
  Floats first_out, first_d_weights;
  for (const int P : {1, 2, 4, 8}) {
    Group group;
    group.placement = block_placement(E, P);
    group.H = H;
    // Uneven cuts of the batch.
    std::vector<std::int64_t> cuts = {0};
    for (int p = 1; p < P; ++p) cuts.push_back(static_cast<std::int64_t>(random_u64(seed, 10000 + static_cast<std::uint64_t>(p)) % (T + 1)));
    cuts.push_back(T);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t p = 0; p < static_cast<std::size_t>(P); ++p) {
      RouteView part = whole.view();
      part.T = cuts[p + 1] - cuts[p];
      part.ids = static_cast<std::int16_t*>(part.ids) + cuts[p] * K;
      part.weights += cuts[p] * K;
      part.counts = nullptr;
      group.routes.push_back(Route::copy_of(part));
      group.x.emplace_back(x.begin() + cuts[p] * H, x.begin() + cuts[p + 1] * H);
    }
    Floats out, d_weights;
    for (const RankResult& result : run_group(group, group.config(), {.weighted = true})) {
      out.insert(out.end(), result.out.begin(), result.out.end());
      d_weights.insert(d_weights.end(), result.d_weights.begin(), result.d_weights.end());
    }
    if (P == 1) first_out = out;
    if (P == 1) first_d_weights = d_weights;
    RC_ASSERT(out == first_out);
    RC_ASSERT(d_weights == first_d_weights);
  }
}

TEST(ExchangeShapes, ManyRanksDividingE) {
  for (const int P : {3, 5, 6, 36, 72}) {
    std::vector<std::int64_t> T;
    for (int p = 0; p < P; ++p) T.push_back(p % 4);
    const Group group = random_group(T, 36, 360, 4, {.seed = 72, .unit_weights = true}, true);
    const auto results = run_group(group, group.config());
    for (std::size_t p = 0; p < results.size(); ++p) expect_factor(group, p, results[p].out);
  }
}

TEST(ExchangeShapes, EveryKFrom1To36) {
  run_ranks(3, [&](Fabric& fabric) {
    for (std::int64_t K = 1; K <= 36; ++K) {
      const Group group = random_group({7, 0, 12}, K, 36, 4, {.seed = static_cast<std::uint64_t>(K), .unit_weights = true}, true);
      Exchange exchange(group.config(), group.placement, fabric);
      const auto p = static_cast<std::size_t>(fabric.rank());
      expect_factor(group, p, run_rank(exchange, group, p, {}).out);
    }
  });
}

TEST(ExchangeShapes, AllTokensToOneRank) {
  for (const std::int64_t target : {0, 2, 3}) {
    const Group group = random_group({20, 3, 0, 40}, 4, 16, 6, {.seed = 4, .first_expert = target * 4, .num_experts = 4, .unit_weights = true}, true);
    const auto results = run_group(group, group.config());
    for (std::size_t p = 0; p < 4; ++p) {
      expect_factor(group, p, results[p].out);
      const bool hot = static_cast<std::int64_t>(p) == target;
      EXPECT_EQ(results[p].handle.layout.R(), hot ? 63 : 0);
      EXPECT_EQ(results[p].handle.layout.S(), hot ? 252 : 0);
    }
  }
}

// Local ids travel as int32 where a rank holds more than 32,768 experts.
TEST(ExchangeShapes, WideLocalIds) {
  const Group group = random_group({9, 4}, 3, 80000, 4, {.seed = 40, .unit_weights = true}, true);
  const auto results = run_group(group, group.config());
  for (std::size_t p = 0; p < 2; ++p) expect_factor(group, p, results[p].out);
  EXPECT_EQ(results[0].bytes.ids % 4, 0);
}

}  // namespace
}  // namespace waybill
