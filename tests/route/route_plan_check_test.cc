// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <limits>

#include "route/random_routes.h"
#include "waybill/route_plan.h"

namespace waybill {
namespace {

using Ids = std::vector<std::int32_t>;
using testing::HasSubstr;

// The worked example of the header.
RoutePlan example() { return make_route_plan(Route::from_ids(3, 2, 4, Ids{0, 2, 3, 1, 2, 3}), block_placement(4, 2)); }

std::string refusal_of(const std::function<void(RoutePlan&)>& spoil) {
  RoutePlan plan = example();
  spoil(plan);
  try {
    validate(plan, block_placement(4, 2));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(RoutePlanCheck, TheWorkedExampleIsValidAndReadable) {
  EXPECT_NO_THROW(validate(example(), block_placement(4, 2)));
  EXPECT_EQ(describe(example()), "plan: T = 3, K = 2, P = 2: 5 rows, 6 slots (1.20 a row)\n  to rank 0: 2 rows, 2 slots\n  to rank 1: 3 rows, 4 slots");
  EXPECT_EQ(describe(RoutePlan{}), "plan: T = 0, K = 0, P = 1: 0 rows, 0 slots (0.00 a row)");
}

TEST(RoutePlanCheck, BrokenPlansAreRefusedWithPlaceAndValues) {
  EXPECT_EQ(refusal_of([](RoutePlan&) {}), "accepted");
  const auto expect = [](const std::function<void(RoutePlan&)>& spoil, const char* text) { EXPECT_THAT(refusal_of(spoil), HasSubstr(text)); };
  expect([](RoutePlan& p) { p.P = 3; }, "P = 3, the placement has P = 2");
  expect([](RoutePlan& p) { p.K = 40000; }, "K = 40000 is not in 0 .. 32767");
  expect([](RoutePlan& p) { p.row_offsets.pop_back(); }, "row_offsets has 2 entries, expected 3");
  expect([](RoutePlan& p) { p.row_offsets[0] = 1; }, "row_offsets[0] = 1, expected 0");
  expect([](RoutePlan& p) { p.row_offsets[2] = 4; }, "row_offsets ends at 4, expected 5");
  expect([](RoutePlan& p) { p.slot_offsets[2] = 1; }, "slot_offsets[2] = 1 after 1");
  expect([](RoutePlan& p) { p.slot_k.pop_back(); }, "5 columns for 6 slots");
  expect([](RoutePlan& p) { p.num_bad_ids = 1; }, "1 bad ids beside 6 slots of T * K = 6");
  expect([](RoutePlan& p) { p.row_token[1] = 0; }, "rank 0, row 1: token 0 after 0");
  expect([](RoutePlan& p) { p.row_token[4] = 3; }, "token 3 after 1, expected ascending below T = 3");
  expect([](RoutePlan& p) { p.slot_expert[2] = 2; }, "row 2, slot 2: local expert 2 is not in 0 .. 1");
  expect([](RoutePlan& p) { p.slot_expert[2] = -1; }, "local expert -1");
  expect([](RoutePlan& p) { p.slot_weight[0] = std::numeric_limits<float>::infinity(); }, "row 0, slot 0: weight inf");
  expect([](RoutePlan& p) { p.slot_k[5] = 0; }, "row 4, slot 5: column k = 0 after 0");
  expect([](RoutePlan& p) { p.slot_k[2] = 0; }, "token 0, k = 0 is sent twice, again in row 2");
  expect([](RoutePlan& p) { p.token_rows[1] = 0; }, "token 0: row 0 after 0");
  expect([](RoutePlan& p) { p.token_rows[0] = 1; }, "token 0 lists row 1, which is of token 1");
}

RC_GTEST_PROP(RoutePlanCheck, EveryBuiltPlanIsValid, ()) {
  const int P = *rc::gen::element(1, 2, 3, 8);
  const std::int64_t L = *rc::gen::inRange(1, 9), E = L * P, T = *rc::gen::inRange(0, 40);
  const std::int64_t K = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(E, 12) + 1);
  const auto seed = *rc::gen::arbitrary<std::uint32_t>();
  const RoutePlan plan = make_route_plan(testing_support::random_route(T, K, E, {.seed = seed, .drop = 0.25}), block_placement(E, P));
  validate(plan, block_placement(E, P));
}

}  // namespace
}  // namespace waybill
