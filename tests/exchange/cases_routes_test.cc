// SPDX-License-Identifier: Apache-2.0
// Field cases about routes, permute and combine: F03, F12, F14, F15, F24.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using Ids = std::vector<std::int32_t>;
using testing::ElementsAre;
using testing::HasSubstr;

// One rank. x row t = t + 1 in every column, so that a row's factor is visible.
Group one_rank(Route route, std::int64_t H) {
  Group group;
  group.placement = block_placement(route.E(), 1);
  group.H = H;
  Floats x(static_cast<std::size_t>(route.T() * H));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i / static_cast<std::size_t>(H) + 1);
  group.x.push_back(std::move(x));
  group.routes.push_back(std::move(route));
  return group;
}

std::vector<float> factors(const Group& group, const Floats& out) {
  std::vector<float> result;
  for (std::size_t t = 0; t < static_cast<std::size_t>(group.routes[0].T()); ++t) {
    result.push_back(out[t * static_cast<std::size_t>(group.H)] / group.x[0][t * static_cast<std::size_t>(group.H)]);
  }
  return result;
}

// Backward of identity experts with weights: the input gradient of token t and the weight gradient of each slot.
struct Gradients {
  Floats dx, d_weights;
};
Gradients backward(Exchange& exchange, const Group& group, std::size_t p, const Floats& d_out) {
  const std::int64_t H = group.H, T = group.routes[p].T();
  const DispatchHandle handle = exchange.plan(group.routes[p]);
  const ReceiveLayout& layout = handle.layout;
  Tensor rows, d_rows;
  exchange.dispatch(handle, to_tensor(group.x[p], T, H, DType::kF32), rows);
  exchange.dispatch(handle, to_tensor(d_out, T, H, DType::kF32), d_rows);
  Tensor y(DType::kF32, {layout.S_padded(), H}), dy(DType::kF32, {layout.S_padded(), H}), dz(DType::kF32, {layout.R(), H}), dx(DType::kF32, {T, H});
  permute(layout, rows, y);
  Floats d_slots(static_cast<std::size_t>(layout.S_padded()), std::numeric_limits<float>::quiet_NaN());
  unpermute_reduce_backward(layout, y, true, d_rows, dy, d_slots.data());
  unpermute_reduce(layout, dy, false, dz);  // backward of permute
  exchange.combine(handle, dz, dx);
  Gradients gradients;
  gradients.d_weights.assign(static_cast<std::size_t>(T * group.routes[p].K()), std::numeric_limits<float>::quiet_NaN());
  exchange.return_slot_values(handle, d_slots.data(), gradients.d_weights.data());
  gradients.dx = to_floats(dx);
  return gradients;
}

TEST(ExchangeCases, F03_RowsOfOnlyMinusOneCombineToExactlyZero) {
  const std::vector<Ids> batches = {Ids{0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1},
                                    Ids{-1, -1, -1, -1, -1, -1, -1, -1, 2, -1, -1, -1, -1, -1, -1, -1}};
  for (const Ids& ids : batches) {
    const Group group = one_rank(Route::from_ids(2, 8, 128, ids), 12);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto results = run_group(group, group.config(), {.out_dtype = dtype});
      expect_factor(group, 0, results[0].out);
      const std::size_t empty = ids[0] == -1 ? 0 : 12;
      for (std::size_t h = 0; h < 12; ++h) {
        EXPECT_EQ(results[0].out[empty + h], 0.0f);
        EXPECT_FALSE(std::signbit(results[0].out[empty + h]));
      }
    }
  }
}

// A NaN row that goes nowhere must not leak: 0 * NaN is NaN, a skipped row is 0.
TEST(ExchangeCases, F03_ANaNRowWithoutRoutesStaysOut) {
  Group group = one_rank(Route::from_ids(3, 2, 4, Ids{0, 1, -1, -1, 2, -1}), 4);
  for (std::size_t h = 4; h < 8; ++h) group.x[0][h] = std::numeric_limits<float>::quiet_NaN();
  const auto results = run_group(group, group.config());
  EXPECT_THAT(results[0].out, ElementsAre(2, 2, 2, 2, 0, 0, 0, 0, 3, 3, 3, 3));
}

TEST(ExchangeCases, F12_DroppedSlotsCombineByTheirNumber) {
  for (const std::int64_t E : {std::int64_t{2}, std::int64_t{40000}}) {  // int16 and int32 ids
    const auto check = [&](std::int64_t T, std::int64_t K, const Ids& ids, const Ids& counts, const Ids& sources, const Floats& expected) {
      const Group group = one_rank(Route::from_ids(T, K, E, ids), 3);
      const auto results = run_group(group, group.config());
      const ReceiveLayout& layout = results[0].handle.layout;
      EXPECT_EQ(Ids(layout.expert_counts.begin(), layout.expert_counts.begin() + 2), counts);
      Ids tokens;
      for (const std::int32_t row : layout.slot_row) tokens.push_back(results[0].handle.plan.row_token[static_cast<std::size_t>(row)]);
      EXPECT_EQ(tokens, sources);
      EXPECT_EQ(factors(group, results[0].out), expected);
    };
    check(4, 2, {0, 1, -1, 0, 1, -1, -1, -1}, {2, 2}, {0, 1, 0, 2}, {2, 1, 1, 0});
    check(3, 1, {1, -1, 0}, {1, 1}, {2, 0}, {1, 0, 1});
    check(4, 2, Ids(8, -1), {0, 0}, {}, {0, 0, 0, 0});
  }
}

TEST(ExchangeCases, F12_GradientsAtDroppedSlotsAreExactlyZero) {
  const Group group = one_rank(Route::from_ids(4, 2, 2, Ids{0, 1, -1, 0, 1, -1, -1, -1}), 2);
  const auto fabric = make_single_fabric();
  Exchange exchange(group.config(), group.placement, *fabric);
  const Gradients gradients = backward(exchange, group, 0, Floats(8, 1.0f));
  EXPECT_THAT(gradients.dx, ElementsAre(2, 2, 1, 1, 1, 1, 0, 0));
  EXPECT_THAT(gradients.d_weights, ElementsAre(2, 2, 0, 4, 6, 0, 0, 0));  // <x_t, 1> = 2 (t + 1) at valid slots
}

TEST(ExchangeCases, F14_GarbageIdsAreIgnoredAlikeAndCounted) {
  Route route(3, 2, 8);
  const Ids ids = {4, -1, 8, 5, 32767, -32768};
  for (std::int64_t i = 0; i < 6; ++i) {
    route.view().set_id(i / 2, i % 2, ids[static_cast<std::size_t>(i)]);
    route.view().weights[i] = ids[static_cast<std::size_t>(i)] == -1 ? 0.0f : 1.0f;
  }
  route.recount();
  // Two ranks: rank 0 brings the tokens, rank 1 holds experts 4..7.
  Group group;
  group.placement = block_placement(8, 2);
  group.H = 4;
  group.x = {Floats{1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, Floats{}};
  group.routes.push_back(std::move(route));
  group.routes.push_back(Route(0, 2, 8));
  const auto results = run_group(group, group.config());
  EXPECT_THAT(results[1].handle.layout.expert_counts, ElementsAre(1, 1, 0, 0));
  EXPECT_THAT(results[1].handle.layout.slot_row, ElementsAre(0, 1));
  EXPECT_THAT(results[0].handle.plan.row_token, ElementsAre(0, 1));
  EXPECT_THAT(results[0].out, ElementsAre(1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0));
  EXPECT_EQ(results[0].status.num_bad_ids, 3);
  EXPECT_NE(results[0].status.flags & kStatusBadId, 0u);
  EXPECT_EQ(results[1].status.num_bad_ids, 0);
  EXPECT_EQ(results[0].handle.layout.S(), 0);
  EXPECT_THAT(results[0].d_weights, ElementsAre(1, 0, 0, 1, 0, 0));

  ExchangeConfig checked = group.config();
  checked.debug_checks = true;
  const auto texts = errors_of_ranks(2, [&](Fabric& fabric) {
    Exchange exchange(checked, group.placement, fabric);
    exchange.plan(group.routes[static_cast<std::size_t>(fabric.rank())]);
  });
  EXPECT_THAT(texts, testing::Each(HasSubstr("row 1, slot 0: id 8")));
}

// 90 rows padded to 128: everything that is not padding equals the unpadded run, backward too.
TEST(ExchangeCases, F15_PaddedRunEqualsTheTightRun) {
  Ids ids(100, 0);
  std::fill(ids.begin() + 90, ids.end(), -1);
  Floats weights(100);
  for (std::size_t t = 0; t < 90; ++t) weights[t] = 0.25f + static_cast<float>(t) / 128;
  const Group group = one_rank(Route::from_ids(100, 1, 2, ids, weights), 8);
  ExchangeConfig padded = group.config();
  padded.alignment = 128;
  const auto tight_run = run_group(group, group.config(), {.weighted = true}), padded_run = run_group(group, padded, {.weighted = true});
  const ReceiveLayout& layout = padded_run[0].handle.layout;
  EXPECT_THAT(layout.expert_offsets, ElementsAre(0, 128, 128));
  EXPECT_THAT(layout.expert_counts, ElementsAre(90, 0));
  EXPECT_EQ(std::count(layout.slot_row.begin(), layout.slot_row.end(), -1), 38);
  EXPECT_EQ(group.routes[0].view().counts[0], 90);
  EXPECT_TRUE(same_bits(tight_run[0].out, padded_run[0].out));
  EXPECT_TRUE(same_bits(tight_run[0].d_weights, padded_run[0].d_weights));
  const auto fabric = make_single_fabric();
  Exchange tight_exchange(group.config(), group.placement, *fabric), padded_exchange(padded, group.placement, *fabric);
  const Floats d_out = normal_values(800, 6);
  const Gradients a = backward(tight_exchange, group, 0, d_out), b = backward(padded_exchange, group, 0, d_out);
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.d_weights, b.d_weights));
  // Padding rows are zero forward and backward, even where buffers held NaN before.
  Tensor rows, y(DType::kF32, {128, 8});
  std::fill(y.as<float>(), y.as<float>() + y.size(), std::numeric_limits<float>::quiet_NaN());
  const DispatchHandle handle = padded_exchange.plan(group.routes[0]);
  padded_exchange.dispatch(handle, to_tensor(group.x[0], 100, 8, DType::kF32), rows);
  permute(handle.layout, rows, y);
  for (std::int64_t i = 90 * 8; i < 128 * 8; ++i) ASSERT_EQ(y.as<float>()[i], 0.0f);
  Tensor dy(DType::kF32, {128, 8});
  Floats d_slots(128, std::numeric_limits<float>::quiet_NaN());
  unpermute_reduce_backward(handle.layout, y, true, rows, dy, d_slots.data());
  for (std::int64_t i = 90 * 8; i < 128 * 8; ++i) ASSERT_EQ(dy.as<float>()[i], 0.0f);
  for (std::size_t s = 90; s < 128; ++s) ASSERT_EQ(d_slots[s], 0.0f);
}

TEST(ExchangeCases, F24_FreshAndReplayedHandlesPadAlike) {
  Ids ids(77);
  for (std::size_t t = 0; t < 77; ++t) ids[t] = t < 44 ? 0 : t < 45 ? 2 : 3;
  const std::int64_t H = 2880, F = 1408;
  EXPECT_EQ(H / 32, 90);
  EXPECT_EQ(F / 32, 44);
  EXPECT_EQ(H % 32 + F % 32, 0);
  const Group group = one_rank(Route::from_ids(77, 1, 4, ids), H);
  const auto fabric = make_single_fabric();
  ExchangeConfig blocks = group.config();
  blocks.alignment = 32;
  Exchange padded(blocks, group.placement, *fabric), tight(group.config(), group.placement, *fabric);
  const DispatchHandle fresh = padded.plan(group.routes[0]), plain = tight.plan(group.routes[0]);
  const auto check = [](const ReceiveLayout& layout) {
    EXPECT_THAT(layout.expert_offsets, ElementsAre(0, 64, 64, 96, 128));
    EXPECT_EQ(layout.S_padded(), 128);
    EXPECT_THAT(layout.expert_counts, ElementsAre(44, 0, 1, 32));
  };
  check(fresh.layout);
  EXPECT_THAT(plain.layout.expert_offsets, ElementsAre(0, 44, 44, 45, 77));
  EXPECT_EQ(plain.layout.S_padded(), 77);
  // A saved handle replayed, and the same routes planned again: the same padding and the same bytes.
  const Tensor x = to_tensor(group.x[0], 77, H, DType::kBF16);
  Tensor first, second, third;
  padded.dispatch(fresh, x, first);
  padded.dispatch(fresh, x, second);
  const DispatchHandle again = padded.plan(group.routes[0]);
  check(again.layout);
  EXPECT_EQ(again.layout.slot_position, fresh.layout.slot_position);
  padded.dispatch(again, x, third);
  EXPECT_TRUE(same_bits(to_floats(first), to_floats(second)));
  EXPECT_TRUE(same_bits(to_floats(first), to_floats(third)));
  // Real rows land where the padded starts say.
  Tensor y(DType::kBF16, {128, H}), y_tight(DType::kBF16, {77, H});
  permute(fresh.layout, first, y);
  permute(plain.layout, first, y_tight);
  for (std::int64_t e = 0; e < 4; ++e) {
    const auto i = static_cast<std::size_t>(e);
    const std::int64_t count = fresh.layout.expert_counts[i];
    const Floats a = to_floats(y.view().rows(fresh.layout.expert_offsets[i], fresh.layout.expert_offsets[i] + count));
    const Floats b = to_floats(y_tight.view().rows(plain.layout.expert_offsets[i], plain.layout.expert_offsets[i] + count));
    EXPECT_TRUE(same_bits(a, b)) << "expert " << e;
  }
}

}  // namespace
}  // namespace waybill
