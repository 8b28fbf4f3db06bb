// SPDX-License-Identifier: Apache-2.0
// The gate matmul on the host: values worked by hand, both operand types, bad input.
#include "waybill/gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace waybill {
namespace {

using testing::HasSubstr;

TEST(Gate, ForwardAndBackwardByHand) {
  std::vector<float> x = {1, 2, 3, -1, 0, 2}, w = {1, 0, 1, 2, -1, 0}, logits(4), dx(6), dw = {10, 10, 10, 10, 10, 10}, g = {1, 2, 0, -1};
  const auto view = [](std::vector<float>& v, std::int64_t rows, std::int64_t columns) { return TensorView::of(v.data(), {rows, columns}); };
  ThreadPool pool(2);
  for (const Stream stream : {Stream{}, Stream::cpu(&pool)}) {
    gate_forward(view(x, 2, 3), view(w, 2, 3), view(logits, 2, 2), stream);
    EXPECT_EQ(logits, (std::vector<float>{4, 0, 1, -2}));
    gate_backward(view(x, 2, 3), view(w, 2, 3), view(g, 2, 2), view(dx, 2, 3), {}, false, stream);
    EXPECT_EQ(dx, (std::vector<float>{5, -2, 1, -2, 1, 0}));
    gate_backward(view(x, 2, 3), view(w, 2, 3), view(g, 2, 2), {}, view(dw, 2, 3), false, stream);
    EXPECT_EQ(dw, (std::vector<float>{1, 2, 3, 3, 4, 4}));
    gate_backward(view(x, 2, 3), view(w, 2, 3), view(g, 2, 2), {}, view(dw, 2, 3), true, stream);
    EXPECT_EQ(dw, (std::vector<float>{2, 4, 6, 6, 8, 8}));
  }
}

TEST(Gate, Bf16OperandsGiveFp32Sums) {
  std::vector<bf16> x = {bf16(1.5f), bf16(-2.0f)}, w = {bf16(3.0f), bf16(0.25f)};
  std::vector<float> logits(1);
  gate_forward(TensorView(x.data(), DType::kBF16, {1, 2}), TensorView(w.data(), DType::kBF16, {1, 2}), TensorView::of(logits.data(), {1, 1}));
  EXPECT_EQ(logits[0], 4.0f);
}

TEST(Gate, NoTokensGiveNoGradient) {
  std::vector<float> w = {1, 2}, dw = {7, 7};
  const TensorView none(nullptr, DType::kF32, {0, 2}), no_logits(nullptr, DType::kF32, {0, 1});
  gate_forward(none, TensorView::of(w.data(), {1, 2}), no_logits);
  gate_backward(none, TensorView::of(w.data(), {1, 2}), no_logits, {}, TensorView::of(dw.data(), {1, 2}), true);
  EXPECT_EQ(dw, (std::vector<float>{7, 7}));
  gate_backward(none, TensorView::of(w.data(), {1, 2}), no_logits, {}, TensorView::of(dw.data(), {1, 2}), false);
  EXPECT_EQ(dw, (std::vector<float>{0, 0}));
}

TEST(Gate, WhatDoesNotFitIsRefusedWithItsValues) {
  std::vector<float> x(6), w(8), logits(4);
  const auto refusal = [&](const TensorView& a, const TensorView& b, const TensorView& out) {
    try {
      gate_forward(a, b, out);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const TensorView good_x = TensorView::of(x.data(), {2, 3}), good_w = TensorView::of(w.data(), {2, 3});
  EXPECT_THAT(refusal(good_x, TensorView::of(w.data(), {2, 4}), TensorView::of(logits.data(), {2, 2})), HasSubstr("x [T, H] and weight [E, H]"));
  EXPECT_THAT(refusal(good_x, good_w, TensorView::of(logits.data(), {2, 1})), HasSubstr("logits must be a contiguous f32 [2, 2] on cpu"));
  EXPECT_THAT(refusal(TensorView(x.data(), DType::kF16, {2, 3}), TensorView(w.data(), DType::kF16, {2, 3}), TensorView::of(logits.data(), {2, 2})),
              HasSubstr("takes bf16 or f32, got f16"));
  TensorView far = good_x;
  far.device = Device{DeviceType::kCuda, 0};
  TensorView far_w = good_w, far_logits = TensorView::of(logits.data(), {2, 2});
  far_w.device = far_logits.device = far.device;
  EXPECT_THAT(refusal(far, far_w, far_logits), HasSubstr("no CUDA backend is linked"));
}

}  // namespace
}  // namespace waybill
