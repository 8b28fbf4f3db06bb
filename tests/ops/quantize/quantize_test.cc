// SPDX-License-Identifier: Apache-2.0
// Blocks of every recipe against their definition, and what a block may not depend on.
#include <gtest/gtest.h>

#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

struct Recipe {
  const char* name;
  QuantConfig config;
};
const Recipe kRecipes[] = {{"mxfp8_e4m3_rows", mxfp8_rows()},
                           {"mxfp8_e5m2_rows_floor", mxfp8_rows(ElementFormat::kE5M2, ScaleRule::kFloor)},
                           {"mxfp8_e4m3_columns", mxfp8_columns()},
                           {"mxfp8_e5m2_columns", mxfp8_columns(ElementFormat::kE5M2)},
                           {"fp8_rows_power_of_two", fp8_rows()},
                           {"fp8_rows_f32", fp8_rows(ScaleFormat::kF32)},
                           {"fp8_tiles_power_of_two", fp8_tiles()},
                           {"fp8_tiles_f32", fp8_tiles(ScaleFormat::kF32)},
                           {"nvfp4_rows", nvfp4_rows()}};

class Quantize : public ::testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Recipes, Quantize, ::testing::ValuesIn(kRecipes), [](const auto& param) { return std::string(param.param.name); });

// Every code and scale recomputed from the formulas in fp64, block by block.
TEST_P(Quantize, FollowsItsFormulaInEveryBlock) {
  const QuantConfig& config = GetParam().config;
  const std::vector<std::int32_t> sizes = {44, 0, 1, 200, 32};
  const std::int64_t S = 277, C = 160;
  const Tensor offsets = offsets_of(sizes), x = wild_tensor(S + 3, C, 31);
  for (std::int64_t i = S * C; i < x.size(); ++i) x.as<float>()[i] = kNaN;  // rows past the last group
  const Quantized q = quantized(config, x, offsets);
  const Tensor y = dequantized(q, S + 3, C, offsets);
  const std::vector<std::int64_t> first_block = block_row_offsets(offsets, config.block_rows);
  std::int64_t begin = 0;
  for (std::size_t g = 0; g < sizes.size(); ++g) {
    double group_amax = 0;
    for (std::int64_t i = begin * C; i < (begin + sizes[g]) * C; ++i) group_amax = std::max(group_amax, std::abs(static_cast<double>(x.as<float>()[i])));
    const float group = config.scale == ScaleFormat::kE4M3 ? q.group_scales.as<float>()[g] : 1.0f;
    if (config.scale == ScaleFormat::kE4M3 && sizes[g] > 0) {
      EXPECT_EQ(group, 2688.0f / static_cast<float>(group_amax));
    }
    for (std::int64_t r = 0; r < sizes[g]; ++r) {
      for (std::int64_t c = 0; c < C; ++c) {
        double amax = 0;
        const std::int64_t r0 = r / config.block_rows * config.block_rows, c0 = c / config.block_columns * config.block_columns;
        for (std::int64_t i = r0; i < std::min<std::int64_t>(r0 + config.block_rows, sizes[g]); ++i) {
          for (std::int64_t j = c0; j < std::min(c0 + config.block_columns, C); ++j) {
            amax = std::max(amax, std::abs(static_cast<double>(x.as<float>()[(begin + i) * C + j])));
          }
        }
        const std::int64_t scale_at = (first_block[g] + r / config.block_rows) * q.scales.dim(1) + c / config.block_columns;
        const double largest = largest_value(config.element);
        double scale = 0;
        switch (config.scale) {
          case ScaleFormat::kE8M0:
            scale = decode_e8m0(q.scales.as<std::uint8_t>()[scale_at]);
            EXPECT_EQ(q.scales.as<std::uint8_t>()[scale_at], encode_e8m0(static_cast<float>(amax), config.element, config.rule));
            break;
          case ScaleFormat::kPowerOfTwo:
            scale = q.scales.as<float>()[scale_at];
            EXPECT_EQ(scale, std::exp2(std::ceil(std::log2(amax / largest))));
            break;
          case ScaleFormat::kF32:
            scale = q.scales.as<float>()[scale_at];
            EXPECT_EQ(scale, static_cast<float>(amax) / static_cast<float>(largest));
            break;
          case ScaleFormat::kE4M3:
            scale = decode_element(ElementFormat::kE4M3, q.scales.as<std::uint8_t>()[scale_at]);
            EXPECT_EQ(q.scales.as<std::uint8_t>()[scale_at], encode_element(ElementFormat::kE4M3, static_cast<float>(amax) / 6.0f * group));
            break;
        }
        const std::int64_t at = (begin + r) * C + c;
        const float value = x.as<float>()[at];
        const float scaled =
            config.scale == ScaleFormat::kE4M3 ? (scale == 0 ? 0.0f : value * group / static_cast<float>(scale)) : value / static_cast<float>(scale);
        const std::uint8_t code = encode_element(config.element, scaled);
        const std::uint8_t* codes = q.codes.as<std::uint8_t>();
        const int stored = config.element != ElementFormat::kE2M1 ? codes[at] : c % 2 == 0 ? codes[at / 2] & 0xf : codes[at / 2] >> 4;
        ASSERT_EQ(stored, code) << "row " << begin + r << " column " << c;
        float back = decode_element(config.element, code) * static_cast<float>(scale);
        if (config.scale == ScaleFormat::kE4M3) back /= group;
        ASSERT_EQ(y.as<float>()[at], back);
      }
    }
    begin += sizes[g];
  }
  for (std::int64_t i = S * C; i < y.size(); ++i) ASSERT_EQ(y.as<float>()[i], 0.0f) << "a row past the last group was written";
  EXPECT_EQ(q.codes.as<std::uint8_t>()[q.codes.size() - 1], 0xa5) << "a code past the last group was written";
}

TEST_P(Quantize, OfAGroupDoesNotDependOnItsNeighbours) {
  const QuantConfig& config = GetParam().config;
  const std::int64_t C = 64;
  const Tensor x = wild_tensor(90, C, 32), offsets = offsets_of({37, 53}), one = offsets_of({53});
  const Quantized both = quantized(config, x, offsets);
  Tensor second(DType::kF32, {53, C});
  std::memcpy(second.as<float>(), x.as<float>() + 37 * C, static_cast<std::size_t>(second.size()) * 4);
  const Quantized alone = quantized(config, second, one);
  const std::size_t code_row = static_cast<std::size_t>(both.codes.dim(1));
  EXPECT_EQ(std::memcmp(both.codes.as<std::uint8_t>() + 37 * code_row, alone.codes.as<std::uint8_t>(), 53 * code_row), 0);
  const std::int64_t first = block_row_offsets(offsets, config.block_rows)[1];
  const std::size_t item = size_bytes(both.scales.view().dtype);
  EXPECT_EQ(std::memcmp(static_cast<const char*>(both.scales.view().data) + static_cast<std::size_t>(first * both.scales.dim(1)) * item,
                        alone.scales.view().data, static_cast<std::size_t>(alone.scales.size()) * item),
            0);
}

TEST_P(Quantize, GivesTheSameBitsForAnyNumberOfThreads) {
  QuantConfig config = GetParam().config;
  const Tensor x = wild_tensor(300, 128, 33), offsets = offsets_of({100, 0, 200});
  for (const bool stochastic : {false, true}) {
    config.stochastic = stochastic;
    config.seed = 5;
    const Quantized alone = quantized(config, x, offsets);
    ThreadPool pool(3);
    const Quantized together = quantized(config, x, offsets, &pool);
    EXPECT_TRUE(bit_equal(alone.codes, together.codes));
    EXPECT_TRUE(bit_equal(alone.scales, together.scales));
  }
}

TEST_P(Quantize, StochasticRoundingHasTheRightMean) {
  QuantConfig config = GetParam().config;
  config.stochastic = true;
  const std::int64_t C = 256, draws = 400;
  Tensor x(DType::kF32, {1, C});
  for (std::int64_t c = 0; c < C; ++c) x.as<float>()[c] = c % 16 == 0 ? 6.0f : 0.3f + 0.01f * static_cast<float>(c % 16);
  std::vector<double> sum(static_cast<std::size_t>(C), 0.0);
  for (std::int64_t i = 0; i < draws; ++i) {
    config.seed = static_cast<std::uint64_t>(i);
    const Tensor y = dequantized(quantized(config, x), 1, C);
    for (std::int64_t c = 0; c < C; ++c) sum[static_cast<std::size_t>(c)] += y.as<float>()[c];
  }
  double bias = 0;
  for (std::int64_t c = 0; c < C; ++c) bias += sum[static_cast<std::size_t>(c)] / draws - x.as<float>()[c];
  // Steps are at most 1 here (4-bit elements), so a mean over 240 * 400 draws has a deviation below 0.5 / sqrt(96000) = 0.0017.
  EXPECT_NEAR(bias / C, 0.0, 0.008);
}

TEST_P(Quantize, ZerosStayZerosUnderAFiniteScale) {
  const Tensor x = Tensor::zeros(DType::kF32, {5, 128});
  const Quantized q = quantized(GetParam().config, x);
  const Tensor y = dequantized(q, 5, 128);
  for (std::int64_t i = 0; i < y.size(); ++i) ASSERT_EQ(y.as<float>()[i], 0.0f);
}

TEST_P(Quantize, ANanSpoilsItsBlockAndNothingElse) {
  const QuantConfig& config = GetParam().config;
  const std::int64_t S = 256, C = 256, row = 130, column = 50;
  const Tensor clean = wild_tensor(S, C, 34), spoilt = wild_tensor(S, C, 34);
  spoilt.as<float>()[row * C + column] = kNaN;
  const Tensor a = dequantized(quantized(config, clean), S, C), b = dequantized(quantized(config, spoilt), S, C);
  for (std::int64_t r = 0; r < S; ++r) {
    for (std::int64_t c = 0; c < C; ++c) {
      const bool same_block = r / config.block_rows == row / config.block_rows && c / config.block_columns == column / config.block_columns;
      if (same_block) {
        ASSERT_TRUE(std::isnan(b.as<float>()[r * C + c])) << r << " " << c;
      } else {
        ASSERT_EQ(a.as<float>()[r * C + c], b.as<float>()[r * C + c]) << r << " " << c;
      }
    }
  }
}

TEST_P(Quantize, Bf16InputEqualsTheSameValuesInFp32) {
  const Tensor x = wild_tensor(40, 128, 35);
  Tensor narrow(DType::kBF16, {40, 128}), widened(DType::kF32, {40, 128});
  for (std::int64_t i = 0; i < x.size(); ++i) {
    narrow.as<bf16>()[i] = bf16(x.as<float>()[i]);
    widened.as<float>()[i] = static_cast<float>(narrow.as<bf16>()[i]);
  }
  const Quantized a = quantized(GetParam().config, narrow), b = quantized(GetParam().config, widened);
  EXPECT_TRUE(bit_equal(a.codes, b.codes));
  EXPECT_TRUE(bit_equal(a.scales, b.scales));
}

// A 1x128 power-of-two tensor is a legal MXFP8 tensor with four equal scales.
TEST(QuantizeFormats, PowerOfTwoBlocksOf128AreLegalMxfp8) {
  const Tensor x = wild_tensor(20, 256, 36);
  const Quantized wide = quantized(fp8_rows(), x);
  Quantized as_mx(mxfp8_rows(), 20, 256, {});
  std::memcpy(as_mx.codes.as<std::uint8_t>(), wide.codes.as<std::uint8_t>(), 20 * 256);
  for (std::int64_t i = 0; i < as_mx.scales.size(); ++i) {
    as_mx.scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(std::ilogb(wide.scales.as<float>()[i / 4]) + 127);
  }
  EXPECT_TRUE(bit_equal(dequantized(as_mx, 20, 256), dequantized(wide, 20, 256)));
}

// Element * scale is exactly a bf16: E4M3 under 2^-124 .. 2^119, E5M2 under 2^-117 .. 2^112, E2M1 under any E4M3 scale.
TEST(QuantizeFormats, DequantisedValuesAreExactInBf16) {
  const auto check = [](ElementFormat format, int codes, int low, int high) {
    for (int code = 0; code < codes; ++code) {
      const float element = decode_element(format, static_cast<std::uint8_t>(code));
      if (!std::isfinite(element)) continue;
      for (int e = low; e <= high; ++e) {
        const float value = element * static_cast<float>(std::ldexp(1.0, e));
        ASSERT_EQ(static_cast<float>(bf16(value)), value) << code << " * 2^" << e;
      }
    }
  };
  check(ElementFormat::kE4M3, 256, -124, 119);
  check(ElementFormat::kE5M2, 256, -117, 112);
  for (int code = 0; code < 16; ++code) {
    for (int scale = 0; scale < 0x7f; ++scale) {
      const float value =
          decode_element(ElementFormat::kE2M1, static_cast<std::uint8_t>(code)) * decode_element(ElementFormat::kE4M3, static_cast<std::uint8_t>(scale));
      ASSERT_EQ(static_cast<float>(bf16(value)), value);
    }
  }
}

TEST(QuantizeRefusals, NameTheValues) {
  const Tensor x = Tensor::zeros(DType::kF32, {4, 64}), half(DType::kF16, {4, 64}), past = offsets_of({2, 3}), narrow = Tensor::zeros(DType::kF32, {4, 24});
  const Quantized q(mxfp8_rows(), 4, 64, {}), q4(nvfp4_rows(), 4, 24, {}), wide(fp8_rows(), 4, 64, {});
  EXPECT_EQ(refusal([&] { quantize(mxfp8_rows(), half, {}, q.view()); }), "quantize: the tensor must be f32 or bf16, got f16 [4, 64] on cpu");
  EXPECT_EQ(refusal([&] { quantize(mxfp8_rows(), x, past, q.view()); }), "quantize: offsets[2] = 5 exceeds the 4 rows");
  EXPECT_EQ(refusal([&] { quantize(fp8_rows(), x, {}, q.view()); }), "quantize: scales must be [4, 1], got u8 [4, 2] on cpu");
  EXPECT_EQ(refusal([&] { quantize(fp8_rows(), x, {}, {q.codes, x.view().rows(0, 4), {}}); }), "quantize: scales must be [4, 1], got f32 [4, 64] on cpu");
  EXPECT_EQ(refusal([&] { quantize(nvfp4_rows(), narrow, {}, q4.view()); }),
            "C (columns) = 24 does not fit NVFP4: it must be a multiple of 16 (24 mod 16 = 8)");
  EXPECT_EQ(refusal([&] {
              quantize({ElementFormat::kE4M3, ScaleFormat::kE8M0, ScaleRule::kRoundUp, 0, 32}, x, {}, q.view());
            }),
            "quantize: a block must have rows and columns, got 0 x 32");
}

TEST(QuantizeFormats, NoRowsAreLegal) {
  const Tensor x(DType::kF32, {0, 64}), offsets = offsets_of({0, 0});
  for (const Recipe& recipe : kRecipes) {
    const Quantized q = quantized(recipe.config, x, offsets);
    EXPECT_EQ(q.scales.dim(0), 0);
    EXPECT_EQ(dequantized(q, 0, 64, offsets).size(), 0);
  }
}

}  // namespace
}  // namespace waybill::testing
