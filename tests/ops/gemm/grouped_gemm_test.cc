// SPDX-License-Identifier: Apache-2.0
// Forward, dgrad and wgrad of every implementation against an fp64 loop over groups.
#include "ops/gemm/gemm_test_util.h"

namespace waybill::testing {
namespace {

struct Problem {
  std::vector<std::int64_t> sizes;
  std::int64_t N, C;
  DType in = DType::kF32, out = DType::kF32;
  WeightLayout layout = WeightLayout::kLNC;
  bool gather = false, bias = false, accumulate = false;

  std::int64_t L() const { return static_cast<std::int64_t>(sizes.size()); }
  std::int64_t S() const {
    std::int64_t sum = 0;
    for (const std::int64_t size : sizes) sum += size;
    return sum;
  }
  std::int64_t weight(std::int64_t g, std::int64_t n, std::int64_t c) const { return g * N * C + (layout == WeightLayout::kLNC ? n * C + c : c * N + n); }
  Tensor weights(std::uint32_t seed, DType dtype) const {
    return layout == WeightLayout::kLNC ? random_tensor(dtype, {L(), N, C}, seed) : random_tensor(dtype, {L(), C, N}, seed);
  }
  std::string describe() const {
    std::string text = fmt::format("N={} C={} in={} out={} layout={} gather={} bias={} accumulate={} sizes=", N, C, to_string(in), to_string(out),
                                   static_cast<int>(layout), gather, bias, accumulate);
    for (const std::int64_t size : sizes) text += std::to_string(size) + ",";
    return text;
  }
  // A row list with every fifth slot a padding row, over more rows than slots.
  std::vector<std::int32_t> rows() const {
    std::vector<std::int32_t> list(static_cast<std::size_t>(S()));
    for (std::size_t s = 0; s < list.size(); ++s) list[s] = s % 5 == 3 ? -1 : static_cast<std::int32_t>((s * 7 + 2) % (list.size() + 3));
    return list;
  }
};

void check_forward(const Problem& p) {
  SCOPED_TRACE("forward " + p.describe());
  const std::int64_t S = p.S(), a_rows = p.gather ? S + 3 : S;
  const Tensor a = random_tensor(p.in, {a_rows, p.C}, 1), weights = p.weights(2, p.in), offsets = offsets_of(p.sizes);
  const Tensor bias = random_tensor(DType::kF32, {p.L(), p.N}, 3);
  const std::vector<std::int32_t> list = p.rows();
  const Tensor rows = index_tensor(list);
  const Tensor before = random_tensor(p.out, {S + 2, p.N}, 4);  // two rows past the last group
  const Tensor y = copy_of(before);
  GroupedGemmArgs args{a, weights, offsets, y, p.layout, {}, {}, p.accumulate};
  if (p.gather) args.a_rows = rows;
  if (p.bias) args.bias = bias;
  grouped_gemm(args);
  std::int64_t s = 0;
  for (std::int64_t g = 0; g < p.L(); ++g) {
    for (const std::int64_t end = s + p.sizes[static_cast<std::size_t>(g)]; s < end; ++s) {
      const std::int64_t row = p.gather ? list[static_cast<std::size_t>(s)] : s;
      for (std::int64_t n = 0; n < p.N; ++n) {
        Sum sum;
        if (p.accumulate) sum.add(load_element(before, s * p.N + n), 1);
        for (std::int64_t c = 0; row >= 0 && c < p.C; ++c) sum.add(load_element(a, row * p.C + c), load_element(weights, p.weight(g, n, c)));
        if (row >= 0 && p.bias) sum.add(load_element(bias, g * p.N + n), 1);
        expect_near_sum(y, s * p.N + n, sum, "y");
      }
    }
  }
  for (std::int64_t i = S * p.N; i < y.size(); ++i) ASSERT_EQ(load_element(y, i), load_element(before, i)) << "a row past the last group was written";
}

void check_dgrad(const Problem& p) {
  SCOPED_TRACE("dgrad " + p.describe());
  const std::int64_t S = p.S();
  const Tensor dy = random_tensor(p.in, {S, p.N}, 5), weights = p.weights(6, p.in), offsets = offsets_of(p.sizes);
  const Tensor before = random_tensor(p.out, {S + 2, p.C}, 7);
  const Tensor da = copy_of(before);
  grouped_gemm_dgrad({dy, weights, offsets, da, p.layout, p.accumulate});
  std::int64_t s = 0;
  for (std::int64_t g = 0; g < p.L(); ++g) {
    for (const std::int64_t end = s + p.sizes[static_cast<std::size_t>(g)]; s < end; ++s) {
      for (std::int64_t c = 0; c < p.C; ++c) {
        Sum sum;
        if (p.accumulate) sum.add(load_element(before, s * p.C + c), 1);
        for (std::int64_t n = 0; n < p.N; ++n) sum.add(load_element(dy, s * p.N + n), load_element(weights, p.weight(g, n, c)));
        expect_near_sum(da, s * p.C + c, sum, "da");
      }
    }
  }
  for (std::int64_t i = S * p.C; i < da.size(); ++i) ASSERT_EQ(load_element(da, i), load_element(before, i)) << "a row past the last group was written";
}

void check_wgrad(const Problem& p) {
  SCOPED_TRACE("wgrad " + p.describe());
  const std::int64_t S = p.S(), a_rows = p.gather ? S + 3 : S;
  const Tensor a = random_tensor(p.in, {a_rows, p.C}, 8), dy = random_tensor(p.in, {S, p.N}, 9), offsets = offsets_of(p.sizes);
  const std::vector<std::int32_t> list = p.rows();
  const Tensor rows = index_tensor(list);
  const Tensor before = p.weights(10, p.out), bias_before = random_tensor(DType::kF32, {p.L(), p.N}, 11);
  const Tensor d_weights = copy_of(before), d_bias = copy_of(bias_before);
  GroupedGemmWgradArgs args{a, dy, offsets, d_weights, p.layout, {}, {}, p.accumulate};
  if (p.gather) args.a_rows = rows;
  if (p.bias) args.d_bias = d_bias;
  grouped_gemm_wgrad(args);
  std::int64_t begin = 0;
  for (std::int64_t g = 0; g < p.L(); ++g) {
    const std::int64_t end = begin + p.sizes[static_cast<std::size_t>(g)];
    for (std::int64_t n = 0; n < p.N; ++n) {
      Sum bias_sum;
      if (p.accumulate) bias_sum.add(load_element(bias_before, g * p.N + n), 1);
      for (std::int64_t c = 0; c < p.C; ++c) {
        Sum sum;
        if (p.accumulate) sum.add(load_element(before, p.weight(g, n, c)), 1);
        for (std::int64_t s = begin; s < end; ++s) {
          const std::int64_t row = p.gather ? list[static_cast<std::size_t>(s)] : s;
          if (row >= 0) sum.add(load_element(dy, s * p.N + n), load_element(a, row * p.C + c));
        }
        expect_near_sum(d_weights, p.weight(g, n, c), sum, "d_weights");
        if (begin == end) {
          ASSERT_EQ(load_element(d_weights, p.weight(g, n, c)), p.accumulate ? load_element(before, p.weight(g, n, c)) : 0.0f);
        }
      }
      for (std::int64_t s = begin; s < end; ++s) {
        if (!p.gather || list[static_cast<std::size_t>(s)] >= 0) bias_sum.add(load_element(dy, s * p.N + n), 1);
      }
      if (p.bias) expect_near_sum(d_bias, g * p.N + n, bias_sum, "d_bias");
    }
    begin = end;
  }
}

void check_all(const Problem& p) {
  check_forward(p);
  check_dgrad(p);
  check_wgrad(p);
}

class GroupedGemm : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::force_gemm(GetParam().c_str()); }
  void TearDown() override { detail::force_gemm(""); }
};
INSTANTIATE_TEST_SUITE_P(Implementations, GroupedGemm, ::testing::ValuesIn(implementations()), [](const auto& param) { return param.param; });

const std::vector<std::int64_t> kOddSizes = {0, 1, 15, 16, 17, 31, 32, 33, 44, 127, 128, 129, 130};

TEST_P(GroupedGemm, EverySizeOfGroupIsRight) {
  check_all({kOddSizes, 24, 40});
  check_all({kOddSizes, 40, 24, DType::kF32, DType::kF32, WeightLayout::kLCN});
}

TEST_P(GroupedGemm, EveryOptionIsRightAlone) {
  const std::vector<std::int64_t> sizes = {3, 0, 17, 33, 1};
  for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
    for (const DType in : {DType::kF32, DType::kBF16}) {
      for (int option = 0; option < 8; ++option) {
        const bool gather = option & 1, bias = option & 2, accumulate = option & 4;
        check_all({sizes, 37, 29, in, DType::kF32, layout, gather, bias, accumulate});
        if (!accumulate) check_all({sizes, 37, 29, in, DType::kBF16, layout, gather, bias, false});
      }
    }
  }
}

TEST_P(GroupedGemm, OrdinaryWidthsAreRight) {
  for (const std::int64_t width : {std::int64_t{64}, std::int64_t{136}, std::int64_t{40}}) {
    check_all({{16, 0, 9}, width, 48});
    check_all({{16, 0, 9}, 48, width, DType::kBF16, DType::kBF16});
  }
}

TEST_P(GroupedGemm, DepthBlocksAreJoinedWithoutLoss) {
  check_all({{5, 30}, 33, 769});
  check_all({{5, 30}, 769, 17, DType::kBF16, DType::kBF16, WeightLayout::kLNC, true, true, false});
  check_all({{395, 3}, 34, 20, DType::kF32, DType::kF32, WeightLayout::kLNC, true, true, true});
  check_all({{4, 1}, 18, 512, DType::kF32, DType::kBF16, WeightLayout::kLCN, true, true, false});
}

TEST_P(GroupedGemm, EveryTinyShapeIsRight) {
  for (std::int64_t m = 1; m <= 7; ++m) {
    for (std::int64_t n = 1; n <= 6; ++n) {
      for (std::int64_t k = 1; k <= 6; ++k) check_all({{m, 1}, n, k});
    }
  }
}

TEST_P(GroupedGemm, SpecialLoadsAreRight) {
  check_all({{8, 0, 8, 0}, 24, 16});
  check_all({{0, 0, 0, 0}, 24, 16});
  check_all({{0, 0, 61, 0}, 24, 16});
  check_all({{}, 24, 16});
  check_all({{4, 2}, 8, 0});  // no contraction: forward gives 0
  check_all({{4, 2}, 0, 8});
}

TEST_P(GroupedGemm, AnyNumberOfGroupsIsRight) {
  for (const std::int64_t L : {1, 8, 64, 256, 1152}) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(L));
    for (std::size_t g = 0; g < sizes.size(); ++g) sizes[g] = static_cast<std::int64_t>((g * 5 + 1) % 4);
    check_all({sizes, 8, 8});
  }
}

}  // namespace
}  // namespace waybill::testing
