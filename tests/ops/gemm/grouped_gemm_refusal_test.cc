// SPDX-License-Identifier: Apache-2.0
// Bad arguments are refused with their values, and nothing is written.
#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

struct Fixture {
  Tensor a = random_tensor(DType::kF32, {6, 8}, 1), w = random_tensor(DType::kF32, {2, 5, 8}, 2), dy = random_tensor(DType::kF32, {6, 5}, 3);
  Tensor offsets = offsets_of({2, 4});
  Tensor y = filled_tensor(DType::kF32, {6, 5}, 77), da = filled_tensor(DType::kF32, {6, 8}, 77), d_weights = filled_tensor(DType::kF32, {2, 5, 8}, 77);

  std::string forward(const std::function<void(GroupedGemmArgs&)>& change) {
    GroupedGemmArgs args{a, w, offsets, y, WeightLayout::kLNC, {}, {}, false};
    change(args);
    return message([&] { grouped_gemm(args); }, y);
  }
  std::string dgrad(const std::function<void(GroupedGemmDgradArgs&)>& change) {
    GroupedGemmDgradArgs args{dy, w, offsets, da, WeightLayout::kLNC, false};
    change(args);
    return message([&] { grouped_gemm_dgrad(args); }, da);
  }
  std::string wgrad(const std::function<void(GroupedGemmWgradArgs&)>& change) {
    GroupedGemmWgradArgs args{a, dy, offsets, d_weights, WeightLayout::kLNC, {}, {}, false};
    change(args);
    return message([&] { grouped_gemm_wgrad(args); }, d_weights);
  }
  static std::string message(const std::function<void()>& call, const Tensor& out) {
    std::string text = "accepted";
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      text = error.what();
      for (std::int64_t i = 0; i < out.size(); ++i) EXPECT_EQ(out.as<float>()[i], 77.0f) << "written before the refusal";
    }
    return text;
  }
};

TEST(GroupedGemmRefusals, OffsetsThatAreNotAPrefixSum) {
  Fixture f;
  const Tensor decreasing = index_tensor({0, 4, 2}), sizes = index_tensor({2, 4, 6}), past = index_tensor({0, 2, 7}), negative = index_tensor({0, -1, 6});
  const Tensor short_list = index_tensor({0, 6});
  EXPECT_EQ(f.forward([&](auto& x) { x.offsets = decreasing; }), "grouped_gemm: offsets decrease at group 1: 4 then 2");
  EXPECT_EQ(f.forward([&](auto& x) { x.offsets = negative; }), "grouped_gemm: offsets decrease at group 0: 0 then -1");
  EXPECT_EQ(f.forward([&](auto& x) { x.offsets = sizes; }), "grouped_gemm: offsets[0] must be 0, got 2 (offsets are a prefix sum, not sizes)");
  EXPECT_EQ(f.forward([&](auto& x) { x.offsets = past; }), "grouped_gemm: offsets[2] = 7 exceeds the 6 rows of y");
  EXPECT_EQ(f.forward([&](auto& x) { x.offsets = short_list; }), "grouped_gemm: offsets must be [L + 1] = [3], got i32 [2] on cpu");
  EXPECT_EQ(f.dgrad([&](auto& x) { x.offsets = past; }), "grouped_gemm_dgrad: offsets[2] = 7 exceeds the 6 rows of da");
  EXPECT_EQ(f.wgrad([&](auto& x) { x.offsets = past; }), "grouped_gemm_wgrad: offsets[2] = 7 exceeds the 6 rows of dy");
  EXPECT_EQ(f.wgrad([&](auto& x) { x.offsets = decreasing; }), "grouped_gemm_wgrad: offsets decrease at group 1: 4 then 2");
}

TEST(GroupedGemmRefusals, RowListsThatLeaveTheInput) {
  Fixture f;
  const Tensor high = index_tensor({0, 1, 2, 6, 4, 5}), low = index_tensor({0, -2, 2, 3, 4, 5}), few = index_tensor({0, 1});
  EXPECT_EQ(f.forward([&](auto& x) { x.a_rows = high; }), "grouped_gemm: a_rows[3] = 6 is outside [-1, 6)");
  EXPECT_EQ(f.forward([&](auto& x) { x.a_rows = low; }), "grouped_gemm: a_rows[1] = -2 is outside [-1, 6)");
  EXPECT_EQ(f.forward([&](auto& x) { x.a_rows = few; }), "grouped_gemm: a_rows must be [S] with S >= 6, got i32 [2] on cpu");
  EXPECT_EQ(f.wgrad([&](auto& x) { x.a_rows = high; }), "grouped_gemm_wgrad: a_rows[3] = 6 is outside [-1, 6)");
}

TEST(GroupedGemmRefusals, ShapesAndTypesThatDoNotFit) {
  Fixture f;
  const Tensor narrow(DType::kF32, {6, 7}), half(DType::kF16, {6, 8}), few(DType::kF32, {5, 8}), bias(DType::kF32, {2, 4}), bf(DType::kBF16, {6, 5});
  EXPECT_EQ(f.forward([&](auto& x) { x.a = narrow; }), "grouped_gemm: a has 7 columns, the weights have C = 8");
  EXPECT_EQ(f.forward([&](auto& x) { x.layout = WeightLayout::kLCN; }), "grouped_gemm: a has 8 columns, the weights have C = 5");
  EXPECT_EQ(f.forward([&](auto& x) { x.a = half; }), "grouped_gemm: a must be f32 or bf16, got f16 [6, 8] on cpu");
  EXPECT_EQ(f.forward([&](auto& x) { x.a = few; }), "grouped_gemm: offsets[2] = 6 exceeds the 5 rows of a");
  EXPECT_EQ(f.forward([&](auto& x) { x.bias = bias; }), "grouped_gemm: bias must be f32 [2, 5], got f32 [2, 4] on cpu");
  EXPECT_EQ(f.forward([&](auto& x) { x.weights = f.a; }), "grouped_gemm: weights must have 3 dimensions, got f32 [6, 8] on cpu");
  EXPECT_EQ(f.forward([&](auto& x) { x.a = TensorView{}; }), "grouped_gemm: a must have 2 dimensions, got no tensor");
  EXPECT_EQ(f.forward([&](auto& x) { x.a.stride[0] = 9; }), "grouped_gemm: a must be contiguous, got f32 [6, 8] on cpu with row stride 9");
  EXPECT_EQ(f.forward([&](auto& x) { x.a.device = {DeviceType::kCuda, 1}; }), "grouped_gemm: a is not on the cpu: f32 [6, 8] on cuda:1");
  EXPECT_EQ(f.dgrad([&](auto& x) { x.dy = f.a; }), "grouped_gemm_dgrad: dy has 8 columns, the weights have N = 5");
  EXPECT_EQ(f.wgrad([&](auto& x) { x.d_bias = bias; }), "grouped_gemm_wgrad: d_bias must be f32 [2, 5], got f32 [2, 4] on cpu");
  GroupedGemmArgs into_bf16{f.a, f.w, f.offsets, bf, WeightLayout::kLNC, {}, {}, true};
  EXPECT_THROW(grouped_gemm(into_bf16), Error);
}

}  // namespace
}  // namespace waybill::testing
