// SPDX-License-Identifier: Apache-2.0
// Products of quantised operands on the CPU: those of dequantised ones, to the bit; the plan of the GPU's wide way; refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/gemm/quantized_backend.h"
#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

using ::testing::HasSubstr;

struct Format {
  const char* name;
  QuantConfig rows, weights, columns;
};
const Format kFormats[] = {
    {"fp8", fp8_rows(), fp8_tiles(), {ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1}},
    {"mxfp8", mxfp8_rows(), mxfp8_rows(), mxfp8_columns()},
    {"nvfp4", nvfp4_rows(), nvfp4_rows(), {ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 16, 1}},
};

class QuantizedProducts : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, QuantizedProducts, ::testing::ValuesIn(kFormats), [](const auto& param) { return std::string(param.param.name); });

constexpr std::int64_t kL = 4, kS = 41, kN = 64, kC = 128;
const std::vector<std::int32_t> kSizes = {5, 0, 33, 1};

Tensor weight_offsets(std::int64_t outer) { return offsets_of(std::vector<std::int32_t>(static_cast<std::size_t>(kL), static_cast<std::int32_t>(outer))); }

TEST_P(QuantizedProducts, AreThoseOfDequantisedOperands) {
  for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
    const bool lnc = layout == WeightLayout::kLNC;
    const std::int64_t outer = lnc ? kN : kC, inner = lnc ? kC : kN;
    const Tensor offsets = offsets_of(kSizes), w_offsets = weight_offsets(outer);
    const Quantized a = quantized(GetParam().rows, wild_tensor(kS, kC, 1), offsets), dy = quantized(GetParam().rows, wild_tensor(kS, kN, 2), offsets);
    const Quantized w = quantized(GetParam().weights, wild_tensor(kL * outer, inner, 3), w_offsets);
    const Tensor wide_a = dequantized(a, kS, kC, offsets), wide_dy = dequantized(dy, kS, kN, offsets), wide_w = dequantized(w, kL * outer, inner, w_offsets);
    const TensorView weights = TensorView::of(wide_w.as<float>(), {kL, outer, inner});

    const Tensor y = Tensor::zeros(DType::kF32, {kS, kN}), want = Tensor::zeros(DType::kF32, {kS, kN});
    QuantizedGemmArgs forward;
    forward.a = {a.config, a.view()}, forward.weights = {w.config, w.view()}, forward.offsets = offsets, forward.y = y, forward.layout = layout;
    quantized_gemm(forward);
    GroupedGemmArgs plain;
    plain.a = wide_a, plain.weights = weights, plain.offsets = offsets, plain.y = want, plain.layout = layout;
    grouped_gemm(plain);
    EXPECT_TRUE(bit_equal(y, want)) << "forward";
    EXPECT_EQ(quantized_gemm_workspace(forward), 0u);

    const Tensor da = Tensor::zeros(DType::kF32, {kS, kC}), want_da = Tensor::zeros(DType::kF32, {kS, kC});
    QuantizedDgradArgs dgrad;
    dgrad.dy = {dy.config, dy.view()}, dgrad.weights = {w.config, w.view()}, dgrad.offsets = offsets, dgrad.da = da, dgrad.layout = layout;
    quantized_gemm_dgrad(dgrad);
    GroupedGemmDgradArgs plain_dgrad;
    plain_dgrad.dy = wide_dy, plain_dgrad.weights = weights, plain_dgrad.offsets = offsets, plain_dgrad.da = want_da, plain_dgrad.layout = layout;
    grouped_gemm_dgrad(plain_dgrad);
    EXPECT_TRUE(bit_equal(da, want_da)) << "dgrad";
  }
}

TEST_P(QuantizedProducts, WgradContractsBlocksOfRows) {
  const Tensor offsets = offsets_of(kSizes);
  const Quantized a = quantized(GetParam().columns, wild_tensor(kS, kC, 4), offsets), dy = quantized(GetParam().columns, wild_tensor(kS, kN, 5), offsets);
  const Tensor dw = Tensor::zeros(DType::kF32, {kL, kN, kC}), want = Tensor::zeros(DType::kF32, {kL, kN, kC});
  QuantizedWgradArgs args;
  args.a = {a.config, a.view()}, args.dy = {dy.config, dy.view()}, args.offsets = offsets, args.d_weights = dw;
  quantized_gemm_wgrad(args);
  const Tensor wide_a = dequantized(a, kS, kC, offsets), wide_dy = dequantized(dy, kS, kN, offsets);
  GroupedGemmWgradArgs plain;
  plain.a = wide_a, plain.dy = wide_dy, plain.offsets = offsets, plain.d_weights = want;
  grouped_gemm_wgrad(plain);
  EXPECT_TRUE(bit_equal(dw, want));
}

TEST(QuantizedPlan, PartsFitTheLargerOperandsCopy) {
  for (const std::int64_t S : {1, 100, 4096, 32768}) {
    for (const std::int64_t L : {2, 8, 64}) {
      for (const std::int64_t weights : {1000, 1000000, 30000000}) {
        const detail::WidePlan plan = detail::plan_wide(S, 7168, L, weights);
        const std::int64_t room = std::max(S * 7168, L * weights);
        const std::int64_t rows = plan.part_rows * 7168, groups = plan.part_groups * weights;
        EXPECT_GE(plan.part_rows * plan.row_parts, S);
        EXPECT_GE(plan.part_groups * plan.group_parts, L);
        // One group of weights and an eighth of the rows are always there.
        EXPECT_TRUE(rows + groups <= room || (plan.row_parts == 8 && plan.group_parts == std::min<std::int64_t>(L, 8)))
            << S << " rows, " << L << " groups of " << weights << ": " << plan.row_parts << " x " << plan.group_parts;
        EXPECT_GE(plan.bytes, static_cast<std::size_t>(rows + groups) * 2);
      }
    }
  }
  const detail::WidePlan equal = detail::plan_wide(32768, 7168, 8, 4096 * 7168);
  EXPECT_EQ(equal.row_parts, 2);
  EXPECT_EQ(equal.group_parts, 2);
}

TEST(QuantizedPlan, WgradTakesColumnsThatFitTheLargerOperandsCopy) {
  struct Case {
    std::int64_t N, C, step, dy_parts, a_parts;
  };
  for (const Case& c : {Case{4096, 7168, 256, 1, 3}, {7168, 2048, 256, 2, 1}, {2048, 768, 256, 2, 1}, {2048, 2048, 256, 2, 2}, {256, 384, 128, 1, 3}}) {
    detail::GroupedShape s;
    s.L = 8, s.S = 1000, s.N = c.N, s.C = c.C;
    const detail::WideWgradPlan plan = detail::plan_wide_wgrad(s, c.step);
    EXPECT_EQ(plan.dy_parts, c.dy_parts) << c.N << " x " << c.C;
    EXPECT_EQ(plan.a_parts, c.a_parts) << c.N << " x " << c.C;
    EXPECT_LE(plan.dy_columns + plan.a_columns, std::max(c.N, c.C));
    EXPECT_GE(plan.dy_columns * plan.dy_parts, c.N);
    EXPECT_GE(plan.a_columns * plan.a_parts, c.C);
    EXPECT_TRUE(plan.dy_columns == c.N || plan.dy_columns % c.step == 0);
    EXPECT_TRUE(plan.a_columns == c.C || plan.a_columns % c.step == 0);
    EXPECT_LE(plan.bytes, static_cast<std::size_t>(s.S * std::max(c.N, c.C)) * 2 + 512);
  }
}

TEST(QuantizedRefusals, NameTheRuleAndTheValues) {
  const Tensor offsets = offsets_of(kSizes), w_offsets = weight_offsets(kN);
  const Quantized a = quantized(mxfp8_rows(), wild_tensor(kS, kC, 1), offsets), w = quantized(mxfp8_rows(), wild_tensor(kL * kN, kC, 3), w_offsets);
  const Tensor y = Tensor::zeros(DType::kBF16, {kS, kN}), wide = Tensor::zeros(DType::kF32, {kS + 1, kN});
  QuantizedGemmArgs args;
  args.a = {a.config, a.view()}, args.weights = {w.config, w.view()}, args.offsets = offsets, args.y = y, args.accumulate = true;
  EXPECT_THAT(refusal([&] { quantized_gemm(args); }), HasSubstr("accumulating into y needs f32"));
  args.y = wide;
  EXPECT_THAT(refusal([&] { quantized_gemm(args); }), HasSubstr("codes of a must be [42, 128]"));
  args.y = wide.view().rows(0, kS), args.layout = WeightLayout::kLCN;
  EXPECT_THAT(refusal([&] { quantized_gemm(args); }), HasSubstr("the weights have 128 columns, wanted N = 64"));
}

}  // namespace
}  // namespace waybill::testing
