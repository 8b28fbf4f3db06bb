// SPDX-License-Identifier: Apache-2.0
// Dequantise-then-multiply: the grouped GEMM on dequantised bf16 operands against fp64 on the values of the codes.
#include <gtest/gtest.h>

#include "ops/quantize/quantize_test_util.h"
#include "waybill/grouped_gemm.h"

namespace waybill::testing {
namespace {

struct Recipe {
  const char* name;
  QuantConfig activations, weights;
};
const Recipe kRecipes[] = {{"mxfp8", mxfp8_rows(), mxfp8_rows()}, {"fp8_blocks", fp8_rows(), fp8_tiles()}, {"nvfp4", nvfp4_rows(), nvfp4_rows()}};

class QuantizedGemm : public ::testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedGemm, ::testing::ValuesIn(kRecipes), [](const auto& param) { return std::string(param.param.name); });

float value_of(const Quantized& q, std::int64_t group, std::int64_t scale_row, std::int64_t row, std::int64_t column) {
  const std::uint8_t* codes = q.codes.as<std::uint8_t>() + row * q.codes.dim(1);
  const std::int64_t at = scale_row * q.scales.dim(1) + column / q.config.block_columns;
  if (q.config.element == ElementFormat::kE2M1) {
    const int code = column % 2 == 0 ? codes[column / 2] & 0xf : codes[column / 2] >> 4;
    return decode_element(ElementFormat::kE2M1, static_cast<std::uint8_t>(code)) * decode_element(ElementFormat::kE4M3, q.scales.as<std::uint8_t>()[at]) /
           q.group_scales.as<float>()[group];
  }
  const float scale = q.config.scale == ScaleFormat::kE8M0 ? decode_e8m0(q.scales.as<std::uint8_t>()[at]) : q.scales.as<float>()[at];
  return decode_element(q.config.element, codes[column]) * scale;
}

TEST_P(QuantizedGemm, EqualsTheProductOfTheCodesValues) {
  const std::vector<std::int32_t> sizes = {5, 0, 33, 1};
  const std::int64_t L = 4, S = 39, N = 40, C = 128;
  const Tensor offsets = offsets_of(sizes), x = wild_tensor(S, C, 41), w = wild_tensor(L * N, C, 42);
  const Tensor w_offsets = offsets_of({40, 40, 40, 40});
  const Quantized qx = quantized(GetParam().activations, x, offsets), qw = quantized(GetParam().weights, w, w_offsets);
  const bool exact_in_bf16 = GetParam().activations.scale != ScaleFormat::kE4M3;  // NVFP4's group scale leaves the bf16 grid
  const DType dtype = exact_in_bf16 ? DType::kBF16 : DType::kF32;
  const Tensor dx = dequantized(qx, S, C, offsets, dtype), dw = dequantized(qw, L * N, C, w_offsets, dtype), y(DType::kF32, {S, N});
  const TensorView weights(dw.view().data, dtype, {L, N, C});
  grouped_gemm({dx, weights, offsets, y, WeightLayout::kLNC, {}, {}, false});
  const std::vector<std::int64_t> x_blocks = block_row_offsets(offsets, qx.config.block_rows), w_blocks = block_row_offsets(w_offsets, qw.config.block_rows);
  for (std::int64_t g = 0, begin = 0; g < L; begin += sizes[static_cast<std::size_t>(g)], ++g) {
    for (std::int64_t r = 0; r < sizes[static_cast<std::size_t>(g)]; ++r) {
      for (std::int64_t n = 0; n < N; ++n) {
        double sum = 0, magnitude = 0;
        for (std::int64_t c = 0; c < C; ++c) {
          const double a = value_of(qx, g, x_blocks[static_cast<std::size_t>(g)] + r / qx.config.block_rows, begin + r, c);
          const double b = value_of(qw, g, w_blocks[static_cast<std::size_t>(g)] + n / qw.config.block_rows, g * N + n, c);
          sum += a * b;
          magnitude += std::abs(a * b);
        }
        ASSERT_NEAR(y.as<float>()[(begin + r) * N + n], sum, static_cast<double>(C + 1) * 0x1p-24 * magnitude);
      }
    }
  }
}

// A column-wise copy feeds the weight gradient: groups contract over their own rows only, whatever their size.
TEST(QuantizedGemmColumns, FeedsTheWeightGradient) {
  const std::vector<std::int32_t> sizes = {44, 0, 1, 32};
  const std::int64_t L = 4, S = 77, N = 24, C = 16;
  const Tensor offsets = offsets_of(sizes), x = wild_tensor(S, C, 43), dy = wild_tensor(S, N, 44);
  const Quantized qx = quantized(mxfp8_columns(), x, offsets), qdy = quantized(mxfp8_columns(ElementFormat::kE5M2), dy, offsets);
  const Tensor a = dequantized(qx, S, C, offsets, DType::kBF16), b = dequantized(qdy, S, N, offsets, DType::kBF16), dw(DType::kF32, {L, N, C});
  grouped_gemm_wgrad({a, b, offsets, dw, WeightLayout::kLNC, {}, {}, false});
  const std::vector<std::int64_t> blocks = block_row_offsets(offsets, 32);
  for (std::int64_t g = 0, begin = 0; g < L; begin += sizes[static_cast<std::size_t>(g)], ++g) {
    for (std::int64_t n = 0; n < N; ++n) {
      for (std::int64_t c = 0; c < C; ++c) {
        double sum = 0, magnitude = 0;
        for (std::int64_t r = 0; r < sizes[static_cast<std::size_t>(g)]; ++r) {
          const double p = value_of(qx, g, blocks[static_cast<std::size_t>(g)] + r / 32, begin + r, c);
          const double q = value_of(qdy, g, blocks[static_cast<std::size_t>(g)] + r / 32, begin + r, n);
          sum += p * q;
          magnitude += std::abs(p * q);
        }
        ASSERT_NEAR(dw.as<float>()[(g * N + n) * C + c], sum, 46 * 0x1p-24 * magnitude);
      }
    }
  }
}

}  // namespace
}  // namespace waybill::testing
