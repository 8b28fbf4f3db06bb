// SPDX-License-Identifier: Apache-2.0
// Element offsets beyond 2^31, at their full values: the tensors are address space of which only a few pages are ever touched.
#include "ops/gemm/gemm_test_util.h"
#include "ops/gemm/sparse_memory.h"

namespace waybill::testing {
namespace {

constexpr std::int64_t kRows = 304000, kH = 7168;  // T*K = 38,000 * 8 rows
constexpr std::int64_t kTwo31 = std::int64_t{1} << 31;

TEST(GemmOffsets, F13_TheFiguresOfTheCase) {
  EXPECT_EQ(std::int64_t{38000} * 8, kRows);
  EXPECT_EQ(kRows * kH * 2, 4358144000);
  EXPECT_EQ(kTwo31 / kH, 299593);
  EXPECT_EQ(kTwo31 - 299593 * kH, 1024);
  EXPECT_EQ((kTwo31 + kH - 1) / kH, 299594);
  EXPECT_EQ(kTwo31 / (2 * kH), 149796);
}

TEST(GemmOffsets, F13_GatheredRowsBeyond2To31ElementsAreTheRightRows) {
  const Sparse a(kRows * kH * 2);
  if (!a.ok()) GTEST_SKIP() << "needs 4.1 GiB of address space";
  const std::vector<std::int32_t> list = {0, 149796, 149797, 299591, 299592, 299593, 299594, 303999};
  const std::int64_t S = static_cast<std::int64_t>(list.size()), N = 3;
  const Tensor packed = random_tensor(DType::kBF16, {S, kH}, 1), rows = index_tensor(list), w = random_tensor(DType::kBF16, {1, N, kH}, 2);
  for (std::int64_t s = 0; s < S; ++s) {
    std::memcpy(a.as<bf16>() + list[static_cast<std::size_t>(s)] * kH, packed.as<bf16>() + s * kH, static_cast<std::size_t>(kH) * 2);
  }
  const TensorView view = TensorView::of(a.as<bf16>(), {kRows, kH});
  const Tensor offsets = offsets_of({S}), y(DType::kF32, {S, N}), expected(DType::kF32, {S, N});
  grouped_gemm({view, w, offsets, y, WeightLayout::kLNC, rows, {}, false});
  grouped_gemm({packed, w, offsets, expected, WeightLayout::kLNC, {}, {}, false});
  EXPECT_TRUE(bit_equal(y, expected));
  const Tensor dy = random_tensor(DType::kF32, {S, N}, 3), dw(DType::kF32, {1, N, kH}), dw_expected(DType::kF32, {1, N, kH});
  grouped_gemm_wgrad({view, dy, offsets, dw, WeightLayout::kLNC, rows, {}, false});
  grouped_gemm_wgrad({packed, dy, offsets, dw_expected, WeightLayout::kLNC, {}, {}, false});
  EXPECT_TRUE(bit_equal(dw, dw_expected));
}

TEST(GemmOffsets, F13_WeightsAndTheirGradientsBeyond2To31ElementsAreTheRightOnes) {
  const std::int64_t L = 1100, N = 2048, C = 1024, S = 3;  // 2,306,867,200 elements; the last experts start beyond 2^31
  ASSERT_GT((L - 2) * N * C, kTwo31);
  const Sparse weights(L * N * C * 4), gradient(L * N * C * 4);
  if (!weights.ok() || !gradient.ok()) GTEST_SKIP() << "needs 17.2 GiB of address space";
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(L), 0);
  sizes.back() = S;  // only the last expert has rows: empty ones are not touched
  const Tensor offsets = offsets_of(sizes), small = random_tensor(DType::kF32, {1, N, C}, 4), a = random_tensor(DType::kF32, {S, C}, 5);
  std::memcpy(weights.as<float>() + (L - 1) * N * C, small.as<float>(), static_cast<std::size_t>(N * C) * 4);
  const TensorView w = TensorView::of(weights.as<float>(), {L, N, C}), dw = TensorView::of(gradient.as<float>(), {L, N, C});
  const Tensor y(DType::kF32, {S, N}), expected(DType::kF32, {S, N}), one = offsets_of({S});
  grouped_gemm({a, w, offsets, y, WeightLayout::kLNC, {}, {}, false});
  grouped_gemm({a, small, one, expected, WeightLayout::kLNC, {}, {}, false});
  EXPECT_TRUE(bit_equal(y, expected));
  const Tensor da(DType::kF32, {S, C}), da_expected(DType::kF32, {S, C});
  grouped_gemm_dgrad({y, w, offsets, da, WeightLayout::kLNC, false});
  grouped_gemm_dgrad({y, small, one, da_expected, WeightLayout::kLNC, false});
  EXPECT_TRUE(bit_equal(da, da_expected));
  const Tensor dw_expected = Tensor::zeros(DType::kF32, {1, N, C});
  grouped_gemm_wgrad({a, y, offsets, dw, WeightLayout::kLNC, {}, {}, true});  // accumulating leaves the empty experts alone
  grouped_gemm_wgrad({a, y, one, dw_expected, WeightLayout::kLNC, {}, {}, true});
  EXPECT_EQ(std::memcmp(gradient.as<float>() + (L - 1) * N * C, dw_expected.as<float>(), static_cast<std::size_t>(N * C) * 4), 0);
}

TEST(GemmOffsets, F13_RowStridesBeyond2To31ElementsAreFollowed) {
  const std::int64_t stride = kTwo31 + 1024, m = 3, n = 5, k = 7;
  const Sparse a(m * stride * 4), c(m * stride * 4);
  if (!a.ok() || !c.ok()) GTEST_SKIP() << "needs 48 GiB of address space";
  const Tensor small = random_tensor(DType::kF32, {m, k}, 6), b = random_tensor(DType::kF32, {k, n}, 7), expected(DType::kF32, {m, n});
  for (std::int64_t i = 0; i < m; ++i) std::memcpy(a.as<float>() + i * stride, small.as<float>() + i * k, static_cast<std::size_t>(k) * 4);
  TensorView a_view = TensorView::of(a.as<float>(), {m, k}), c_view = TensorView::of(c.as<float>(), {m, n});
  a_view.stride[0] = c_view.stride[0] = stride;
  gemm({a_view, b, c_view, false, false, false});
  gemm({small, b, expected, false, false, false});
  for (std::int64_t i = 0; i < m; ++i) EXPECT_EQ(std::memcmp(c.as<float>() + i * stride, expected.as<float>() + i * n, static_cast<std::size_t>(n) * 4), 0);
}

}  // namespace
}  // namespace waybill::testing
