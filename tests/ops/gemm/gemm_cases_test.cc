// SPDX-License-Identifier: Apache-2.0
// Field cases of the grouped GEMM.
#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

class GemmCases : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::force_gemm(GetParam().c_str()); }
  void TearDown() override { detail::force_gemm(""); }
};
INSTANTIATE_TEST_SUITE_P(Implementations, GemmCases, ::testing::ValuesIn(implementations()), [](const auto& param) { return param.param; });

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Memory that the allocator hands out next has held NaN.
void poison_allocator() {
  std::vector<Tensor> used;
  for (int i = 0; i < 8; ++i) used.push_back(filled_tensor(DType::kF32, {64 * 32 * 4}, kNaN));
}

void expect_every_element(const Tensor& d_weights, std::int64_t group, float value) {
  const std::int64_t elements = d_weights.dim(1) * d_weights.dim(2);
  for (std::int64_t i = 0; i < elements; ++i) ASSERT_EQ(d_weights.as<float>()[group * elements + i], value) << "group " << group << " element " << i;
}

TEST_P(GemmCases, F20_EmptyExpertsHaveAGradientOfExactlyZero) {
  const std::int64_t N = 64, C = 32;
  for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
    poison_allocator();
    const Tensor x = filled_tensor(DType::kBF16, {16, C}, 1), dy = filled_tensor(DType::kBF16, {16, N}, 1), offsets = offsets_of({8, 0, 8, 0});
    const auto shaped = [&](float value) {
      return layout == WeightLayout::kLNC ? filled_tensor(DType::kF32, {4, N, C}, value) : filled_tensor(DType::kF32, {4, C, N}, value);
    };
    const Tensor written = shaped(kNaN), added = shaped(5.0f);
    grouped_gemm_wgrad({x, dy, offsets, written, layout, {}, {}, false});
    grouped_gemm_wgrad({x, dy, offsets, added, layout, {}, {}, true});
    const float fresh[] = {8, 0, 8, 0}, accumulated[] = {13, 5, 13, 5};
    for (int g = 0; g < 4; ++g) {
      expect_every_element(written, g, fresh[g]);
      expect_every_element(added, g, accumulated[g]);
    }
  }
}

TEST_P(GemmCases, F20_EverySubsetOfEmptyGroupsIsClean) {
  const std::int64_t N = 12, C = 20;
  for (int num_empty = 6; num_empty <= 17; ++num_empty) {
    std::vector<std::int64_t> sizes(18);
    for (int g = 0; g < 18; ++g) sizes[static_cast<std::size_t>((g * 7) % 18)] = g < num_empty ? 0 : 1 + g % 5;
    std::int64_t S = 0;
    for (const std::int64_t size : sizes) S += size;
    poison_allocator();
    const Tensor x = random_tensor(DType::kBF16, {S, C}, 1), dy = random_tensor(DType::kBF16, {S, N}, 2), offsets = offsets_of(sizes);
    const Tensor together = filled_tensor(DType::kF32, {18, N, C}, kNaN);
    grouped_gemm_wgrad({x, dy, offsets, together, WeightLayout::kLNC, {}, {}, false});
    for (std::int64_t g = 0, begin = 0; g < 18; begin += sizes[static_cast<std::size_t>(g)], ++g) {
      const std::int64_t end = begin + sizes[static_cast<std::size_t>(g)];
      if (begin == end) {
        expect_every_element(together, g, 0.0f);
        continue;
      }
      const Tensor alone(DType::kF32, {N, C});
      gemm({dy.view().rows(begin, end), x.view().rows(begin, end), alone, true, false, false});
      for (std::int64_t i = 0; i < N * C; ++i) ASSERT_EQ(together.as<float>()[g * N * C + i], alone.as<float>()[i]) << "group " << g;
    }
  }
}

TEST_P(GemmCases, F20_NoRowsAtAllIsLegal) {
  const Tensor x(DType::kBF16, {0, 32}), dy(DType::kBF16, {0, 64}), offsets = offsets_of({0, 0, 0, 0});
  const Tensor d_weights = filled_tensor(DType::kF32, {4, 64, 32}, kNaN), d_bias = filled_tensor(DType::kF32, {4, 64}, kNaN);
  grouped_gemm_wgrad({x, dy, offsets, d_weights, WeightLayout::kLNC, {}, d_bias, false});
  for (int g = 0; g < 4; ++g) expect_every_element(d_weights, g, 0.0f);
  for (std::int64_t i = 0; i < d_bias.size(); ++i) EXPECT_EQ(d_bias.as<float>()[i], 0.0f);
}

// Part a: groups packed at 64 rows. A caller that pads describes the gaps with a_rows = -1, or leaves them to the group before.
TEST_P(GemmCases, F21_AGroupBoundaryInsideATileChangesTheExpert) {
  const std::int64_t width = 48;
  const std::vector<std::int64_t> sizes = {128, 130, 65}, starts = {0, 128, 320};
  const std::int64_t total = 448;  // 320 + ceil(65/64)*64
  EXPECT_EQ(starts[2] + (sizes[2] + 63) / 64 * 64, total);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(total), -1);
  for (std::size_t g = 0; g < 3; ++g) {
    for (std::int64_t i = 0; i < sizes[g]; ++i) rows[static_cast<std::size_t>(starts[g] + i)] = static_cast<std::int32_t>(starts[g] + i);
  }
  Tensor weights = Tensor::zeros(DType::kF32, {3, width, width});
  for (std::int64_t g = 0; g < 3; ++g) {
    for (std::int64_t i = 0; i < width; ++i) weights.as<float>()[(g * width + i) * width + i] = static_cast<float>(g + 1);
  }
  const Tensor x = random_tensor(DType::kF32, {total, width}, 3), y = filled_tensor(DType::kF32, {total, width}, kNaN);
  const Tensor offsets = offsets_of({128, 192, 128}), list = index_tensor(rows);
  grouped_gemm({x, weights, offsets, y, WeightLayout::kLNC, list, {}, false});
  for (std::int64_t s = 0; s < total; ++s) {
    const float factor = rows[static_cast<std::size_t>(s)] < 0 ? 0.0f : s < 128 ? 1.0f : s < 258 ? 2.0f : 3.0f;  // padding rows are zero
    for (std::int64_t c = 0; c < width; ++c) ASSERT_EQ(y.as<float>()[s * width + c], factor * x.as<float>()[s * width + c]) << "row " << s;
  }
}

TEST_P(GemmCases, F21_TightlyPackedGroupsOfAnySizeAreRight) {
  const std::vector<std::int64_t> sizes = {1, 127, 129, 0, 2};
  const std::int64_t width = 40, S = 259;
  Tensor weights = Tensor::zeros(DType::kBF16, {5, width, width});
  for (std::int64_t g = 0; g < 5; ++g) {
    for (std::int64_t i = 0; i < width; ++i) weights.as<bf16>()[(g * width + i) * width + i] = bf16(static_cast<float>(g + 1));
  }
  const Tensor x = random_tensor(DType::kBF16, {S, width}, 3), y = filled_tensor(DType::kF32, {S, width}, kNaN), offsets = offsets_of(sizes);
  grouped_gemm({x, weights, offsets, y, WeightLayout::kLNC, {}, {}, false});
  for (std::int64_t s = 0; s < S; ++s) {
    const float factor = s < 1 ? 1.0f : s < 128 ? 2.0f : s < 257 ? 3.0f : 5.0f;
    for (std::int64_t c = 0; c < width; ++c) ASSERT_EQ(y.as<float>()[s * width + c], factor * static_cast<float>(x.as<bf16>()[s * width + c])) << "row " << s;
  }
}

// Two experts with ten real and 22 padding rows each; weights 0.7 and 0.3; matrices are zero, so only the bias speaks.
TEST_P(GemmCases, F22_BiasStaysOffPaddingRowsAndOutOfTheirGradients) {
  const std::int64_t H = 6, F = 5, rows_per_expert = 32;
  const Tensor offsets = offsets_of({rows_per_expert, rows_per_expert}), bias = random_tensor(DType::kF32, {2, H}, 5);
  for (std::int64_t h = 0; h < H; ++h) bias.as<float>()[H + h] = bias.as<float>()[h];
  const Tensor weights = Tensor::zeros(DType::kF32, {2, H, F});
  std::vector<std::int32_t> list(2 * rows_per_expert, -1);
  for (int e = 0; e < 2; ++e) {
    for (int i = 0; i < 10; ++i) list[static_cast<std::size_t>(e * rows_per_expert + i)] = i;
  }
  const Tensor rows = index_tensor(list), a = random_tensor(DType::kF32, {10, F}, 6);
  const Tensor y = filled_tensor(DType::kF32, {2 * rows_per_expert, H}, kNaN);
  grouped_gemm({a, weights, offsets, y, WeightLayout::kLNC, rows, bias, false});
  for (std::int64_t h = 0; h < H; ++h) {
    for (int t = 0; t < 10; ++t) {
      const float out = 0.7f * y.as<float>()[t * H + h] + 0.3f * y.as<float>()[(rows_per_expert + t) * H + h];
      EXPECT_NEAR(out / bias.as<float>()[h], 1.0, 1e-6);
    }
    for (int pad = 10; pad < 32; ++pad) EXPECT_EQ(y.as<float>()[pad * H + h], 0.0f);
  }
  for (const float junk : {0.0f, kNaN, std::numeric_limits<float>::infinity()}) {
    Tensor dy = filled_tensor(DType::kF32, {2 * rows_per_expert, H}, junk);
    for (int e = 0; e < 2; ++e) {
      for (std::int64_t i = 0; i < 10 * H; ++i) dy.as<float>()[e * rows_per_expert * H + i] = e == 0 ? 0.7f : 0.3f;  // weight * dY
    }
    const Tensor d_weights = filled_tensor(DType::kF32, {2, H, F}, kNaN), d_bias = filled_tensor(DType::kF32, {2, H}, kNaN);
    grouped_gemm_wgrad({a, dy, offsets, d_weights, WeightLayout::kLNC, rows, d_bias, false});
    for (std::int64_t h = 0; h < H; ++h) {
      EXPECT_NEAR(d_bias.as<float>()[h], 7.0, 1e-5);
      EXPECT_NEAR(d_bias.as<float>()[H + h], 3.0, 1e-5);
    }
    for (std::int64_t i = 0; i < H * F; ++i) {
      double column = 0;
      for (int t = 0; t < 10; ++t) column += a.as<float>()[t * F + i % F];
      EXPECT_NEAR(d_weights.as<float>()[i], 0.7 * column, 1e-5);
    }
  }
}

}  // namespace
}  // namespace waybill::testing
