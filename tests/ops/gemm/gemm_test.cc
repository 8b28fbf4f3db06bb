// SPDX-License-Identifier: Apache-2.0
// Dense matmuls of every implementation against fp64, with transposes and row strides.
#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

// A matrix inside a wider buffer.
struct Strided {
  Tensor buffer;
  TensorView view;
  Strided(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t gap, std::uint32_t seed)
      : buffer(random_tensor(dtype, {rows, columns + gap}, seed)), view(buffer.view()) {
    view.shape[1] = columns;
  }
};

struct Problem {
  std::int64_t m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  DType a = DType::kF32, b = DType::kF32;
  std::int64_t gap = 0;
};

void check(const Problem& p) {
  SCOPED_TRACE(fmt::format("m={} n={} k={} ta={} tb={} accumulate={} a={} b={} gap={}", p.m, p.n, p.k, p.transpose_a, p.transpose_b, p.accumulate,
                           to_string(p.a), to_string(p.b), p.gap));
  const Strided a(p.a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.gap, 1);
  const Strided b(p.b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.gap * 2, 2);
  const Strided c(DType::kF32, p.m, p.n, p.gap * 3, 3);
  const Tensor before = copy_of(c.buffer);
  gemm({a.view, b.view, c.view, p.transpose_a, p.transpose_b, p.accumulate});
  const std::int64_t width = p.n + p.gap * 3;
  for (std::int64_t m = 0; m < p.m; ++m) {
    for (std::int64_t n = 0; n < width; ++n) {
      if (n >= p.n) {
        ASSERT_EQ(load_element(c.view, m * width + n), load_element(before, m * width + n)) << "written between rows";
        continue;
      }
      Sum sum;
      if (p.accumulate) sum.add(load_element(before, m * width + n), 1);
      for (std::int64_t k = 0; k < p.k; ++k) {
        sum.add(load_element(a.view, p.transpose_a ? k * a.view.stride[0] + m : m * a.view.stride[0] + k),
                load_element(b.view, p.transpose_b ? n * b.view.stride[0] + k : k * b.view.stride[0] + n));
      }
      expect_near_sum(c.view, m * width + n, sum, "c");
    }
  }
}

class Gemm : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::force_gemm(GetParam().c_str()); }
  void TearDown() override { detail::force_gemm(""); }
};
INSTANTIATE_TEST_SUITE_P(Implementations, Gemm, ::testing::ValuesIn(implementations()), [](const auto& param) { return param.param; });

TEST_P(Gemm, TransposesStridesAndTypesAreRight) {
  for (int option = 0; option < 64; ++option) {
    check({29, 45, 51, (option & 1) != 0, (option & 2) != 0, (option & 4) != 0, option & 8 ? DType::kBF16 : DType::kF32,
           option & 16 ? DType::kBF16 : DType::kF32, option & 32 ? 3 : 0});
  }
}

TEST_P(Gemm, EverySmallShapeIsRight) {
  for (std::int64_t m = 0; m <= 5; ++m) {
    for (std::int64_t n = 0; n <= 5; ++n) {
      for (std::int64_t k = 0; k <= 5; ++k) {
        check({m, n, k});
        check({m, n, k, true, true, true});
      }
    }
  }
}

TEST_P(Gemm, LongContractionsAndManyColumnsAreRight) {
  check({3, 5, 1500});
  check({3, 5, 1500, true, true, true});
  check({460, 3, 9});
  check({2, 1100, 7, false, true});
}

TEST(GemmRefusals, NameTheSizes) {
  const auto message = [](const GemmArgs& args) -> std::string {
    try {
      gemm(args);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const Tensor a(DType::kF32, {4, 8}), b(DType::kF32, {9, 5}), c(DType::kF32, {4, 5}), half(DType::kF16, {4, 8});
  EXPECT_EQ(message({a, b, c}), "gemm: op(a) is [4, 8] but op(b) is [9, 5]");
  const Tensor b_ok(DType::kF32, {8, 6});
  EXPECT_EQ(message({a, b_ok, c}), "gemm: c must be [4, 6], got f32 [4, 5] on cpu");
  EXPECT_EQ(message({half, b_ok, c}), "gemm: a must be f32 or bf16, got f16 [4, 8] on cpu");
  TensorView columns = b_ok;
  columns.stride[1] = 2;
  EXPECT_EQ(message({a, columns, c}), "gemm: the columns of b must be adjacent, got stride 2");
  const Tensor c_half(DType::kBF16, {4, 6});
  EXPECT_EQ(message({a, b_ok, c_half, false, false, true}), "gemm: accumulating into c needs f32, got bf16 [4, 6] on cpu");
}

}  // namespace
}  // namespace waybill::testing
