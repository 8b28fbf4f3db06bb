// SPDX-License-Identifier: Apache-2.0
// Seconds of work in a release build, minutes under a sanitizer.
#include <array>

#include "ops/gemm/gemm_test_util.h"
#include "ops/gemm/sparse_memory.h"

namespace waybill::testing {
namespace {

constexpr std::int64_t kRows = 304000, kH = 7168;  // T*K = 38,000 * 8 rows

// Real rows, not a gather: the product reads 4.1 GiB of zero pages and writes one column. Slow, little memory.
TEST(GemmOffsetsSlow, F13_EveryRowOfALongTensorIsRead) {
  const Sparse a(kRows * kH * 2);
  if (!a.ok()) GTEST_SKIP() << "needs 4.1 GiB of address space";
  const std::array<std::int64_t, 8> sampled = {0, 149796, 149797, 299591, 299592, 299593, 299594, 303999};
  for (const std::int64_t row : sampled) a.as<bf16>()[row * kH + kH - 1] = bf16(static_cast<float>(row % 251 + 1));
  const Tensor w = filled_tensor(DType::kBF16, {1, 1, kH}, 2.0f), offsets = offsets_of({kRows}), y(DType::kF32, {kRows, 1});
  grouped_gemm({TensorView::of(a.as<bf16>(), {kRows, kH}), w, offsets, y, WeightLayout::kLNC, {}, {}, false});
  double others = 0;
  for (std::int64_t row = 0; row < kRows; ++row) others += y.as<float>()[row];
  for (const std::int64_t row : sampled) {
    EXPECT_EQ(y.as<float>()[row], 2.0f * static_cast<float>(row % 251 + 1));
    others -= y.as<float>()[row];
  }
  EXPECT_EQ(others, 0.0);
}

}  // namespace
}  // namespace waybill::testing
