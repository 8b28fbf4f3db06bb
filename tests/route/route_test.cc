// SPDX-License-Identifier: Apache-2.0
#include "waybill/route.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "route/random_routes.h"

namespace waybill {
namespace {

using testing::AllOf;
using testing::HasSubstr;

template <class Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "not refused";
}

TEST(Route, AFreshRouteHasNoRoutes) {
  const Route route(3, 2, 5);
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t k = 0; k < 2; ++k) EXPECT_EQ(route.view().id(t, k), -1);
  }
  EXPECT_NO_THROW(validate(route));
  EXPECT_NO_THROW(validate(Route(0, 1, 1)));
}

TEST(Route, FromIdsCountsAndGivesUnitWeights) {
  const std::vector<std::int32_t> ids = {0, 2, -1, 2, 1, -1};
  const Route route = Route::from_ids(3, 2, 4, ids);
  EXPECT_EQ(std::vector<std::int32_t>(route.view().counts, route.view().counts + 4), (std::vector<std::int32_t>{1, 1, 2, 0}));
  EXPECT_EQ(std::vector<float>(route.view().weights, route.view().weights + 6), (std::vector<float>{1, 1, 0, 1, 1, 0}));
}

TEST(Route, ValidateNamesRowSlotAndValue) {
  const auto with = [](const auto& change) {
    Route route = Route::from_ids(2, 2, 4, std::vector<std::int32_t>{0, 1, 2, 3});
    change(route.view());
    return refusal([&] { validate(route); });
  };
  EXPECT_EQ(with([](const RouteView& v) { v.set_id(1, 0, 4); }), "route row 1, slot 0: id 4 is outside [-1, 4)");
  EXPECT_EQ(with([](const RouteView& v) { v.set_id(0, 1, -2); }), "route row 0, slot 1: id -2 is outside [-1, 4)");
  EXPECT_EQ(with([](const RouteView& v) { v.set_id(1, 1, 2); }), "route row 1, slot 1: expert 2 is named twice in the row");
  EXPECT_EQ(with([](const RouteView& v) { v.weights[2] = std::numeric_limits<float>::infinity(); }),
            "route row 1, slot 0: weight inf of expert 2 is not finite");
  EXPECT_EQ(with([](const RouteView& v) { v.set_id(1, 0, -1); }), "route row 1, slot 0: id -1 must have weight 0, got 1");
  EXPECT_EQ(with([](const RouteView& v) { v.counts[3] = 2; }), "route counts[3] = 2, but the ids name expert 3 1 times");
}

TEST(Route, ValidateAllowsWhatItIsToldToAllow) {
  Route route = Route::from_ids(1, 3, 4, std::vector<std::int32_t>{0, 1, 2});
  route.view().set_id(0, 1, 9);
  route.recount();
  EXPECT_THROW(validate(route), Error);
  EXPECT_NO_THROW(validate(route, RouteCheck{.allow_out_of_range = true}));
  route.view().set_id(0, 1, 0);
  route.recount();
  EXPECT_THROW(validate(route), Error);
  EXPECT_NO_THROW(validate(route, RouteCheck{.allow_duplicates = true}));
}

TEST(Route, FromIdsRefusesBeforeItNarrows) {
  EXPECT_EQ(refusal([] { Route::from_ids(1, 1, 8, std::vector<std::int32_t>{65536}); }), "route row 0, slot 0: id 65536 is outside [-1, 8)");
  EXPECT_THAT(refusal([] { Route::from_ids(1, 2, 8, std::vector<std::int32_t>{1}); }), HasSubstr("2 ids, got 1"));
}

TEST(Route, CopiesAreEqualAndIndependent) {
  const Route source = testing_support::random_route(9, 3, 12, {.seed = 5, .drop = 0.3});
  Route copy = Route::copy_of(source);
  for (std::int64_t i = 0; i < 27; ++i) EXPECT_EQ(copy.view().id(i / 3, i % 3), source.view().id(i / 3, i % 3));
  validate(copy);
  RouteView without_counts = source.view();
  without_counts.counts = nullptr;
  EXPECT_NO_THROW(validate(Route::copy_of(without_counts)));
  copy.view().set_id(0, 0, -1);
  validate(source);
}

TEST(RouteCases, F14_Int16HoldsIdsUpTo32767AndIsRefusedAbove) {
  EXPECT_EQ(route_id_dtype(32768), DType::kI16);
  EXPECT_EQ(route_id_dtype(32769), DType::kI32);
  const Route largest = Route::from_ids(1, 2, 32768, std::vector<std::int32_t>{32767, 0});
  EXPECT_EQ(largest.view().id_dtype, DType::kI16);
  EXPECT_EQ(largest.view().id(0, 0), 32767);
  const Route wide = Route::from_ids(1, 1, 32769, std::vector<std::int32_t>{32768});
  EXPECT_EQ(wide.view().id_dtype, DType::kI32);
  EXPECT_EQ(wide.view().id(0, 0), 32768);
  EXPECT_THAT(refusal([] { Route(1, 1, 32769, DType::kI16); }), AllOf(HasSubstr("32768"), HasSubstr("E = 32769"), HasSubstr("int32")));
  EXPECT_NO_THROW(Route(1, 1, 32768, DType::kI16));
}

TEST(Placement, BlocksAreConsecutive) {
  const ExpertPlacement placement = block_placement(12, 3);
  EXPECT_EQ(placement.L(), 4);
  for (std::int64_t e = 0; e < 12; ++e) {
    EXPECT_EQ(placement.rank_of(e), e / 4);
    EXPECT_EQ(placement.local_of(e), e % 4);
  }
  EXPECT_EQ(refusal([] { block_placement(10, 4); }), "E = 10 experts cannot be spread evenly over P = 4 ranks: E must be divisible by P");
  EXPECT_THAT(refusal([] { block_placement(0, 1); }), HasSubstr("E = 0"));
  EXPECT_THAT(refusal([] { block_placement(4, 0); }), HasSubstr("P = 0"));
}

TEST(Placement, TablesMustBeBijections) {
  std::vector<std::int32_t> ranks = {0, 1, 0, 1}, locals = {0, 0, 1, 1};
  ExpertPlacement placement{4, 2, ranks.data(), locals.data()};
  EXPECT_NO_THROW(validate(placement));
  locals[2] = 0;
  EXPECT_EQ(refusal([&] { validate(placement); }), "placement: experts 0 and 2 both have local id 0 of rank 0");
  locals[2] = 2;
  EXPECT_THAT(refusal([&] { validate(placement); }), HasSubstr("local id 2"));
  ranks[0] = 2;
  EXPECT_THAT(refusal([&] { validate(placement); }), HasSubstr("rank 2"));
  placement.local_table = nullptr;
  EXPECT_THAT(refusal([&] { validate(placement); }), HasSubstr("both tables"));
}

}  // namespace
}  // namespace waybill
