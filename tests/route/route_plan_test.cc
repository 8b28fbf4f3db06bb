// SPDX-License-Identifier: Apache-2.0
#include "waybill/route_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>

#include "route/random_routes.h"
#include "route/route_plan_ref.h"

namespace waybill {
namespace {

using Ids = std::vector<std::int32_t>;
using Offsets = std::vector<std::int64_t>;
using testing::ElementsAre;
using testing::HasSubstr;

// The layout of rank `rank` for the routes of a whole group, straight from the plans of the senders.
ReceiveLayout layout_of(const std::vector<const Route*>& routes, const ExpertPlacement& placement, int rank, std::int64_t alignment) {
  Offsets row_offsets = {0}, row_slot_offsets = {0};
  Ids experts;
  std::vector<float> weights;
  for (const Route* route : routes) {
    const RoutePlan plan = make_route_plan(*route, placement);
    const auto p = static_cast<std::size_t>(rank);
    for (std::int64_t row = plan.row_offsets[p]; row < plan.row_offsets[p + 1]; ++row) {
      for (std::int64_t j = plan.slot_offsets[static_cast<std::size_t>(row)]; j < plan.slot_offsets[static_cast<std::size_t>(row) + 1]; ++j) {
        experts.push_back(plan.slot_expert[static_cast<std::size_t>(j)]);
        weights.push_back(plan.slot_weight[static_cast<std::size_t>(j)]);
      }
      row_slot_offsets.push_back(static_cast<std::int64_t>(experts.size()));
    }
    row_offsets.push_back(static_cast<std::int64_t>(row_slot_offsets.size()) - 1);
  }
  return make_receive_layout(placement.P, placement.L(), row_offsets, row_slot_offsets, experts.data(), weights.data(), alignment);
}

TEST(RoutePlan, TheWorkedExampleOfTheHeader) {
  const Route route = Route::from_ids(3, 2, 4, Ids{0, 2, 3, 1, 2, 3});
  const RoutePlan plan = make_route_plan(route, block_placement(4, 2));
  EXPECT_EQ(plan.row_offsets, (Offsets{0, 2, 5}));
  EXPECT_EQ(plan.row_token, (Ids{0, 1, 0, 1, 2}));
  EXPECT_EQ(plan.slot_offsets, (Offsets{0, 1, 2, 3, 4, 6}));
  EXPECT_EQ(plan.slot_expert, (Ids{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(plan.slot_k, (std::vector<std::int16_t>{0, 1, 1, 0, 0, 1}));
  EXPECT_EQ(plan.token_offsets, (Offsets{0, 2, 4, 5}));
  EXPECT_EQ(plan.token_rows, (Ids{0, 2, 1, 3, 4}));
}

TEST(ReceiveLayout, TheWorkedExampleOfTheHeader) {
  const Route first = Route::from_ids(3, 2, 4, Ids{0, 2, 3, 1, 2, 3}), second = Route::from_ids(2, 2, 4, Ids{1, 0, 3, -1});
  const ReceiveLayout tight = layout_of({&first, &second}, block_placement(4, 2), 0, 1);
  EXPECT_EQ(tight.row_offsets, (Offsets{0, 2, 3}));
  EXPECT_EQ(tight.row_slot_offsets, (Offsets{0, 1, 2, 4}));
  EXPECT_EQ(tight.expert_counts, (Ids{2, 2}));
  EXPECT_EQ(tight.expert_offsets, (Ids{0, 2, 4}));
  EXPECT_EQ(tight.slot_row, (Ids{0, 2, 1, 2}));
  EXPECT_EQ(tight.slot_position, (Offsets{0, 2, 3, 1}));
  const ReceiveLayout aligned = layout_of({&first, &second}, block_placement(4, 2), 0, 4);
  EXPECT_EQ(aligned.expert_counts, (Ids{2, 2}));
  EXPECT_EQ(aligned.expert_offsets, (Ids{0, 4, 8}));
  EXPECT_EQ(aligned.slot_row, (Ids{0, 2, -1, -1, 1, 2, -1, -1}));
  EXPECT_EQ(aligned.slot_position, (Offsets{0, 4, 5, 1}));
  EXPECT_THAT(aligned.slot_weight, ElementsAre(1, 1, 0, 0, 1, 1, 0, 0));
}

void expect_equal(const RoutePlan& a, const RoutePlan& b) {
  EXPECT_EQ(a.row_offsets, b.row_offsets);
  EXPECT_EQ(a.row_token, b.row_token);
  EXPECT_EQ(a.slot_offsets, b.slot_offsets);
  EXPECT_EQ(a.slot_expert, b.slot_expert);
  EXPECT_EQ(a.slot_weight, b.slot_weight);
  EXPECT_EQ(a.slot_k, b.slot_k);
  EXPECT_EQ(a.token_offsets, b.token_offsets);
  EXPECT_EQ(a.token_rows, b.token_rows);
  EXPECT_EQ(a.num_bad_ids, b.num_bad_ids);
}

// L local experts on P ranks, T tokens, K of E, some slots dropped, some ids garbage.
RC_GTEST_PROP(RoutePlanProperty, EqualsTheReferenceWithGarbageIdsAndTables, ()) {
  const int P = *rc::gen::element(1, 2, 3, 5, 8, 36);
  const std::int64_t L = *rc::gen::inRange(1, 9), E = L * P, T = *rc::gen::inRange(0, 40);
  const std::int64_t K = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(E, 12) + 1);
  const auto seed = *rc::gen::arbitrary<std::uint32_t>();
  Route route = testing_support::random_route(T, K, E, {.seed = seed, .drop = 0.25});
  for (std::int64_t i = 0; i < T * K / 10; ++i) {
    const auto where = static_cast<std::int64_t>(random_u64(seed, 900000 + static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(T * K));
    const Ids garbage = {static_cast<std::int32_t>(E), 32767, -32768, -2};
    route.view().set_id(where / K, where % K, garbage[static_cast<std::size_t>(i) % 4]);
  }
  Ids ranks(static_cast<std::size_t>(E)), locals(static_cast<std::size_t>(E));
  for (std::int64_t e = 0; e < E; ++e) {  // round robin
    ranks[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e % P);
    locals[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e / P);
  }
  ExpertPlacement placement = block_placement(E, P);
  if (*rc::gen::arbitrary<bool>()) {
    placement.rank_table = ranks.data();
    placement.local_table = locals.data();
  }
  validate(placement);
  expect_equal(make_route_plan(route, placement), reference::make_route_plan(route, placement));
}

// Every slot has one position and every real position one slot; experts are contiguous and padded to the multiple.
RC_GTEST_PROP(ReceiveLayoutProperty, IsABijectionAndEqualsTheReference, ()) {
  const std::int64_t L = *rc::gen::inRange(1, 20), R = *rc::gen::inRange(0, 60), alignment = *rc::gen::element(1, 2, 7, 32, 128);
  const int P = *rc::gen::inRange(1, 5);
  Offsets row_offsets(static_cast<std::size_t>(P) + 1, R), row_slots = {0};
  for (int p = 0; p < P; ++p) row_offsets[static_cast<std::size_t>(p)] = R * p / P;
  Ids experts;
  std::vector<float> weights;
  for (std::int64_t r = 0; r < R; ++r) {
    const auto count = *rc::gen::inRange<std::int64_t>(0, std::min<std::int64_t>(L, 4) + 1);
    for (std::int64_t j = 0; j < count; ++j) {
      experts.push_back(*rc::gen::inRange(0, static_cast<int>(L)));
      weights.push_back(static_cast<float>(experts.size()));
    }
    row_slots.push_back(static_cast<std::int64_t>(experts.size()));
  }
  const ReceiveLayout layout = make_receive_layout(P, L, row_offsets, row_slots, experts.data(), weights.data(), alignment);
  const ReceiveLayout expected = reference::make_receive_layout(P, L, row_offsets, row_slots, experts.data(), weights.data(), alignment);
  RC_ASSERT(layout.slot_position == expected.slot_position);
  RC_ASSERT(layout.expert_offsets == expected.expert_offsets);
  RC_ASSERT(layout.expert_counts == expected.expert_counts);
  RC_ASSERT(layout.slot_row == expected.slot_row);
  RC_ASSERT(layout.slot_weight == expected.slot_weight);
  std::vector<int> used(layout.slot_row.size(), 0);
  for (std::size_t j = 0; j < experts.size(); ++j) {
    const auto position = static_cast<std::size_t>(layout.slot_position[j]);
    RC_ASSERT(++used[position] == 1);
    RC_ASSERT(layout.slot_weight[position] == weights[j]);
    RC_ASSERT(static_cast<std::int64_t>(position) >= layout.expert_offsets[static_cast<std::size_t>(experts[j])]);
    RC_ASSERT(static_cast<std::int64_t>(position) < layout.expert_offsets[static_cast<std::size_t>(experts[j]) + 1]);
  }
  for (std::size_t s = 0; s < used.size(); ++s) RC_ASSERT((used[s] == 1) == (layout.slot_row[s] >= 0));
  for (const std::int32_t offset : layout.expert_offsets) RC_ASSERT(offset % alignment == 0);
}

TEST(ReceiveLayout, BadMetadataIsRefusedWithTheValues) {
  const Ids experts = {0, 2};
  const std::vector<float> weights = {1, 1};
  const auto refusal = [&](Offsets rows, Offsets slots) -> std::string {
    try {
      make_receive_layout(1, 2, std::move(rows), std::move(slots), experts.data(), weights.data(), 1);
    } catch (const Error& error) {
      return error.what();
    }
    return "not refused";
  };
  EXPECT_THAT(refusal({0, 2}, {0, 1, 2}), HasSubstr("slot 1: local expert 2 is outside [0, 2)"));
  EXPECT_THAT(refusal({0, 1}, {0, 1, 1}), HasSubstr("R + 1 = 2 values, got 3"));
  EXPECT_THAT(refusal({0, 2}, {0, 1, 0}), HasSubstr("row_slot_offsets decreases at 2: 0 after 1"));
  EXPECT_THAT(refusal({0, 1, 2}, {0, 1, 2}), HasSubstr("P + 1 = 2 values, got 3"));
}

// Counts and source tokens of the permuted rows of a group of one rank.
void expect_permuted(const Route& route, const Ids& counts, const Ids& sources) {
  const ReceiveLayout layout = layout_of({&route}, block_placement(route.E(), 1), 0, 1);
  const RoutePlan plan = make_route_plan(route, block_placement(route.E(), 1));
  Ids tokens;
  for (const std::int32_t row : layout.slot_row) tokens.push_back(plan.row_token[static_cast<std::size_t>(row)]);
  EXPECT_EQ(layout.expert_counts, counts);
  EXPECT_EQ(tokens, sources);
}

TEST(RouteCases, F12_DroppedSlotsKeepCountsAndSources) {
  for (const std::int64_t E : {std::int64_t{2}, std::int64_t{40000}}) {  // int16 and int32 ids
    const auto counts = [&](std::int32_t a, std::int32_t b) {
      Ids all(static_cast<std::size_t>(E), 0);
      all[0] = a;
      all[1] = b;
      return all;
    };
    expect_permuted(Route::from_ids(4, 2, E, Ids{0, 1, -1, 0, 1, -1, -1, -1}), counts(2, 2), {0, 1, 0, 2});
    expect_permuted(Route::from_ids(3, 1, E, Ids{1, -1, 0}), counts(1, 1), {2, 0});
    expect_permuted(Route::from_ids(4, 2, E, Ids(8, -1)), counts(0, 0), {});
  }
}

TEST(RouteCases, F14_GarbageIdsAreIgnoredAndCounted) {
  Route route(3, 2, 8);
  const Ids ids = {4, -1, 8, 5, 32767, -32768};
  for (std::int64_t i = 0; i < 6; ++i) {
    route.view().set_id(i / 2, i % 2, ids[static_cast<std::size_t>(i)]);
    route.view().weights[i] = 1.0f;
  }
  const RoutePlan plan = make_route_plan(route, block_placement(8, 2));
  EXPECT_EQ(plan.row_offsets, (Offsets{0, 0, 2}));
  EXPECT_EQ(plan.row_token, (Ids{0, 1}));
  EXPECT_EQ(plan.num_bad_ids, 3);
  const Route nothing(0, 2, 8);
  const ReceiveLayout layout = layout_of({&route, &nothing}, block_placement(8, 2), 1, 1);
  EXPECT_EQ(layout.expert_counts, (Ids{1, 1, 0, 0}));
  EXPECT_EQ(layout.slot_row, (Ids{0, 1}));
  // Checked mode names the first one.
  try {
    route.view().weights[1] = 0;
    validate(route);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "route row 1, slot 0: id 8 is outside [-1, 8)");
  }
}

TEST(RouteCases, F15_PaddingReachesTheMultipleBeyondT) {
  Ids ids(100, 0);
  std::fill(ids.begin() + 90, ids.end(), -1);
  const Route route = Route::from_ids(100, 1, 2, ids);
  const ReceiveLayout layout = layout_of({&route}, block_placement(2, 1), 0, 128);
  EXPECT_EQ(layout.expert_offsets, (Ids{0, 128, 128}));
  EXPECT_EQ(layout.expert_counts, (Ids{90, 0}));
  EXPECT_EQ(std::count(layout.slot_row.begin(), layout.slot_row.end(), -1), 38);
  EXPECT_EQ(layout.S(), 90);
}

// Groups of 44, 0, 1 and 32 rows.
Route groups_of_f24() {
  Ids ids(77);
  for (std::size_t t = 0; t < 77; ++t) ids[t] = t < 44 ? 0 : t < 45 ? 2 : 3;
  return Route::from_ids(77, 1, 4, ids);
}

TEST(RouteCases, F24_GroupsPadToBlocksOnlyWhereAsked) {
  const Route route = groups_of_f24();
  const ReceiveLayout padded = layout_of({&route}, block_placement(4, 1), 0, 32), tight = layout_of({&route}, block_placement(4, 1), 0, 1);
  EXPECT_EQ(padded.expert_offsets, (Ids{0, 64, 64, 96, 128}));  // starts 0, 64, 64, 96; rows 64, 0, 32, 32; 128 in all
  EXPECT_EQ(padded.S_padded(), 128);
  EXPECT_EQ(padded.expert_counts, (Ids{44, 0, 1, 32}));
  EXPECT_EQ(tight.expert_offsets, (Ids{0, 44, 44, 45, 77}));
  EXPECT_EQ(tight.S_padded(), 77);
  EXPECT_EQ(tight.expert_counts, (Ids{44, 0, 1, 32}));
}

}  // namespace
}  // namespace waybill
