// SPDX-License-Identifier: Apache-2.0
// The matmul with an activation beside it equals the two calls, bit for bit; refusals name the values and write nothing.
#include "waybill/grouped_gemm_activation.h"

#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

constexpr std::int64_t kL = 3, kC = 24, kF = 10, kS = 40;

struct Layer {
  Layer(Activation kind, DType dtype, WeightLayout layout, bool listed, bool biased) {
    config.kind = kind, config.limit = 0.7f;
    const std::int64_t inner = activation_input_width(config, kF);
    const bool lnc = layout == WeightLayout::kLNC;
    x = random_tensor(dtype, {kS, kC}, 1), dy = random_tensor(dtype, {kS, kC}, 2);
    w1 = lnc ? random_tensor(dtype, {kL, inner, kC}, 3) : random_tensor(dtype, {kL, kC, inner}, 3);
    w2 = lnc ? random_tensor(dtype, {kL, kF, kC}, 4) : random_tensor(dtype, {kL, kC, kF}, 4);
    bias = random_tensor(DType::kF32, {kL, inner}, 5);
    weight.resize(DType::kF32, {kS}), d_weight.resize(DType::kF32, {kS}), list.resize(DType::kI32, {kS});
    for (std::int64_t s = 0; s < kS; ++s) {
      weight.as<float>()[s] = 0.25f + 0.125f * static_cast<float>(s % 7), d_weight.as<float>()[s] = 77;
      list.as<std::int32_t>()[s] = s % 9 == 4 ? -1 : static_cast<std::int32_t>(s * 7 % kS);
    }
    offsets = offsets_of({13, 0, 20});  // 33 of 40 rows
    h = filled_tensor(dtype, {kS, inner}, 77), out = filled_tensor(dtype, {kS, kF}, 77), da = filled_tensor(dtype, {kS, kF}, 77);
    dh = filled_tensor(dtype, {kS, inner}, 77);
    forward.product.a = x, forward.product.weights = w1, forward.product.offsets = offsets, forward.product.layout = layout;
    forward.activation = config, forward.out = out, forward.weight = weight;
    if (biased) forward.product.bias = bias;
    backward.product.a = dy, backward.product.weights = w2, backward.product.offsets = offsets, backward.product.layout = layout;
    backward.activation = config, backward.h = h, backward.dh = dh, backward.weight = weight, backward.d_weight = d_weight;
    if (listed) forward.product.a_rows = list, backward.product.a_rows = list;
  }

  ActivationConfig config;
  Tensor x, dy, w1, w2, bias, weight, d_weight, list, offsets, h, out, da, dh;
  GroupedGemmActivationArgs forward;
  GroupedGemmActivationBackwardArgs backward;
};

TEST(GroupedGemmActivation, EqualsTheTwoCalls) {
  for (const Activation kind : {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
        for (const bool listed : {false, true}) {
          Layer fused(kind, dtype, layout, listed, listed), two(kind, dtype, layout, listed, listed), alone(kind, dtype, layout, listed, listed);
          fused.forward.product.y = fused.h;
          grouped_gemm_activation(fused.forward);
          two.forward.product.y = two.h;
          grouped_gemm(two.forward.product);
          const std::int32_t rows = two.offsets.as<std::int32_t>()[kL];
          activation_forward(two.config, two.h, two.weight.as<float>(), two.out, {}, &rows);
          grouped_gemm_activation(alone.forward);  // the pre-activation is not kept
          EXPECT_TRUE(bit_equal(fused.h, two.h));
          EXPECT_TRUE(bit_equal(fused.out, two.out));
          EXPECT_TRUE(bit_equal(alone.out, two.out));
          EXPECT_EQ(load_element(fused.out, 33 * kF), 77.0f) << "a row behind the last group was written";
          EXPECT_NE(load_element(fused.out, 32 * kF), 77.0f);

          fused.backward.product.y = fused.da;
          grouped_gemm_activation_backward(fused.backward);
          two.backward.product.y = two.da;
          grouped_gemm(two.backward.product);
          activation_backward(two.config, two.h, two.weight.as<float>(), two.da, two.dh, two.d_weight.as<float>(), {}, &rows);
          EXPECT_TRUE(bit_equal(fused.dh, two.dh));
          EXPECT_EQ(0, std::memcmp(fused.d_weight.view().data, two.d_weight.view().data, sizeof(float) * kS));
          EXPECT_EQ(two.d_weight.as<float>()[33], 77.0f);
          EXPECT_NE(two.d_weight.as<float>()[32], 77.0f);
        }
      }
    }
  }
}

std::string message(const std::function<void(Layer&)>& change, bool is_forward) {
  Layer layer(Activation::kSwiGLU, DType::kF32, WeightLayout::kLNC, false, false);
  change(layer);
  std::string text = "accepted";
  try {
    is_forward ? grouped_gemm_activation(layer.forward) : grouped_gemm_activation_backward(layer.backward);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    text = error.what();
    EXPECT_EQ(load_element(layer.out, 0), 77.0f);
    EXPECT_EQ(load_element(layer.dh, 0), 77.0f);
  }
  return text;
}

TEST(GroupedGemmActivation, RefusesWhatDoesNotFit) {
  EXPECT_EQ(message([](Layer& l) { l.forward.product.accumulate = true; }, true), "grouped_gemm_activation: an activation cannot accumulate");
  EXPECT_EQ(message([](Layer& l) { l.forward.activation.kind = Activation::kReluSquared; }, true),
            "grouped_gemm_activation: the weights give 20 columns, an activation of width F = 10 takes 10");
  EXPECT_EQ(message([](Layer& l) { l.weight.resize(DType::kF32, {5}), l.forward.weight = l.weight; }, true),
            "grouped_gemm_activation: weight must be f32 [40], got f32 [5] on cpu");
  EXPECT_EQ(message([](Layer& l) { l.offsets.as<std::int32_t>()[kL] = 41; }, true), "grouped_gemm: offsets[3] = 41 exceeds the 40 rows of y");
  EXPECT_EQ(message([](Layer& l) { l.backward.product.bias = l.bias; }, false), "grouped_gemm_activation_backward: the gradient takes no bias");
  EXPECT_EQ(message([](Layer& l) { l.backward.h = l.out; }, false), "grouped_gemm_activation_backward: h must be [40, 20], got f32 [40, 10] on cpu");
  EXPECT_EQ(message([](Layer& l) { l.backward.dh = l.da; }, false), "grouped_gemm_activation_backward: dh must be [40, 20], got f32 [40, 10] on cpu");
}

TEST(Activation, RowsBehindTheCountAreLeftAlone) {
  const Tensor h = random_tensor(DType::kF32, {6, 8}, 1);
  Tensor a = filled_tensor(DType::kF32, {6, 4}, 77);
  std::int32_t rows = 4;
  activation_forward({}, h, nullptr, a, {}, &rows);
  EXPECT_NE(load_element(a, 15), 77.0f);
  EXPECT_EQ(load_element(a, 16), 77.0f);
  rows = 7;
  EXPECT_THROW(activation_forward({}, h, nullptr, a, {}, &rows), Error);
}

}  // namespace
}  // namespace waybill::testing
