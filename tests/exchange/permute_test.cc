// SPDX-License-Identifier: Apache-2.0
// The receiver's local steps against the reference, on layouts that the exchange cannot produce too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using testing::ElementsAre;
using testing::HasSubstr;

// Rows 0..3 with 2, 0, 1 and 2 slots on 3 experts, alignment 2.
ReceiveLayout small_layout(std::int64_t alignment = 2) {
  const std::vector<std::int32_t> experts = {2, 0, 0, 2, 0};
  const std::vector<float> weights = {0.5f, 2.0f, 1.0f, 0.25f, 4.0f};
  return make_receive_layout(1, 3, {0, 4}, {0, 2, 2, 3, 5}, experts.data(), weights.data(), alignment);
}

TEST(Permute, AWorkedExample) {
  const ReceiveLayout layout = small_layout();
  EXPECT_THAT(layout.expert_offsets, ElementsAre(0, 4, 4, 6));
  EXPECT_THAT(layout.slot_row, ElementsAre(0, 2, 3, -1, 0, 3));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Floats rows = {1, 2, 3, 4};
  Floats y(6, nan), z(4, nan), dy(6, nan), d_weight(6, nan);
  permute(layout, TensorView::of(rows.data(), {4, 1}), TensorView::of(y.data(), {6, 1}));
  EXPECT_THAT(y, ElementsAre(1, 3, 4, 0, 1, 4));
  unpermute_reduce(layout, TensorView::of(y.data(), {6, 1}), true, TensorView::of(z.data(), {4, 1}));
  EXPECT_THAT(z, ElementsAre(2.5, 0, 3, 17));  // row 0: 0.5 * 1 + 2 * 1; row 1 has no slot; row 3: 0.25 * 4 + 4 * 4
  unpermute_reduce(layout, TensorView::of(y.data(), {6, 1}), false, TensorView::of(z.data(), {4, 1}));
  EXPECT_THAT(z, ElementsAre(2, 0, 3, 8));
  const Floats dz = {10, 20, 30, 40};
  unpermute_reduce_backward(layout, TensorView::of(y.data(), {6, 1}), true, TensorView::of(dz.data(), {4, 1}), TensorView::of(dy.data(), {6, 1}),
                            d_weight.data());
  EXPECT_THAT(dy, ElementsAre(20, 30, 160, 0, 5, 10));
  EXPECT_THAT(d_weight, ElementsAre(10, 90, 160, 0, 10, 160));
  unpermute_reduce_backward(layout, TensorView(), false, TensorView::of(dz.data(), {4, 1}), TensorView::of(dy.data(), {6, 1}), nullptr);
  EXPECT_THAT(dy, ElementsAre(10, 30, 40, 0, 10, 40));
}

// A padding slot may hold anything after the experts ran: it returns to no token.
TEST(Permute, PaddingSlotsReturnToNoToken) {
  const ReceiveLayout layout = small_layout();
  Floats y = {1, 3, 4, std::numeric_limits<float>::quiet_NaN(), 1, 4}, z(4);
  unpermute_reduce(layout, TensorView::of(y.data(), {6, 1}), true, TensorView::of(z.data(), {4, 1}));
  EXPECT_THAT(z, ElementsAre(2.5, 0, 3, 17));
}

TEST(Permute, BackwardMayWriteOverItsInput) {
  const ReceiveLayout layout = small_layout();
  const Floats dz = {10, 20, 30, 40};
  Floats y = {1, 3, 4, 0, 1, 4}, d_weight(6);
  const TensorView view = TensorView::of(y.data(), {6, 1});
  unpermute_reduce_backward(layout, view, true, TensorView::of(dz.data(), {4, 1}), view, d_weight.data());
  EXPECT_THAT(d_weight, ElementsAre(10, 90, 160, 0, 10, 160));
  EXPECT_THAT(y, ElementsAre(20, 30, 160, 0, 5, 10));
}

// <unpermute(y), dz> = <y, backward(dz)>, and the weight gradient is the derivative: exact on small integers.
TEST(Permute, BackwardIsTheAdjoint) {
  for (const std::int64_t alignment : {1, 8}) {
    Route route = random_route(200, 6, 12, {.seed = 3, .drop = 0.2});
    for (std::int64_t i = 0; i < 1200; ++i) {
      if (route.view().weights[i] != 0) route.view().weights[i] = static_cast<float>(1 + i % 5);
    }
    const reference::GroupRoutes group{block_placement(12, 1), {route.view()}};
    const ReceiveLayout layout = reference::receive_layout(group, 0, alignment);
    const std::int64_t H = 37, S = layout.S_padded(), R = layout.R();
    const Floats y = integer_stamps(static_cast<std::size_t>(S * H), 1), dz = integer_stamps(static_cast<std::size_t>(R * H), 2);
    Floats z(static_cast<std::size_t>(R * H)), dy(static_cast<std::size_t>(S * H)), d_weight(static_cast<std::size_t>(S));
    const TensorView y_view = TensorView::of(y.data(), {S, H}), dz_view = TensorView::of(dz.data(), {R, H});
    unpermute_reduce(layout, y_view, true, TensorView::of(z.data(), {R, H}));
    unpermute_reduce_backward(layout, y_view, true, dz_view, TensorView::of(dy.data(), {S, H}), d_weight.data());
    double forward = 0, adjoint = 0, by_weight = 0;
    for (std::size_t i = 0; i < z.size(); ++i) forward += static_cast<double>(z[i]) * dz[i];
    for (std::size_t i = 0; i < dy.size(); ++i) adjoint += static_cast<double>(dy[i]) * y[i];
    for (std::size_t s = 0; s < d_weight.size(); ++s) by_weight += static_cast<double>(layout.slot_weight[s]) * d_weight[s];
    EXPECT_EQ(forward, adjoint);
    EXPECT_EQ(forward, by_weight);  // z is linear in the weights
    EXPECT_NE(forward, 0);
  }
}

TEST(Permute, WrongShapesAndTypesAreRefused) {
  const ReceiveLayout layout = small_layout();
  Floats rows(4), y(6), z(4);
  std::vector<bf16> halves(6);
  const auto refusal = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "not refused";
  };
  EXPECT_THAT(refusal([&] {
                permute(layout, TensorView::of(rows.data(), {4, 1}), TensorView::of(y.data(), {5, 1}));
              }),
              HasSubstr("permute: y must be f32 or bf16 [6, 1]"));
  EXPECT_THAT(refusal([&] { permute(layout, TensorView::of(rows.data(), {3, 1}), TensorView::of(y.data(), {6, 1})); }), HasSubstr("got f32 [3, 1] on cpu"));
  EXPECT_THAT(refusal([&] {
                permute(layout, TensorView::of(rows.data(), {4, 1}), TensorView::of(halves.data(), {6, 1}));
              }),
              HasSubstr("rows are f32, y is bf16"));
  EXPECT_THAT(refusal([&] {
                unpermute_reduce(layout, TensorView::of(y.data(), {6, 1}), true, TensorView::of(halves.data(), {4, 1}));
              }),
              HasSubstr("z must be f32"));
}

}  // namespace
}  // namespace waybill
