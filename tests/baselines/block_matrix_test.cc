// SPDX-License-Identifier: Apache-2.0
// Block-sparse products against the dense formula, entry by entry in double.
#include "baselines/block_matrix.h"

#include <gtest/gtest.h>

#include "moe/harness.h"

namespace waybill::baselines {
namespace {

using test::random_values;
using test::relative_error;

TEST(BlockTopology, WorkedExample) {
  const BlockTopology t = make_block_topology({3, 0, 5}, 6, 4);
  EXPECT_EQ(t.starts, (std::vector<std::int64_t>{0, 4, 4}));
  EXPECT_EQ(t.num_rows(), 12);
  EXPECT_EQ(t.row_expert, (std::vector<std::int32_t>{0, 2, 2}));
  EXPECT_EQ(t.row_offsets, (std::vector<std::int64_t>{0, 2, 4, 6}));
  EXPECT_EQ(t.block_column, (std::vector<std::int32_t>{0, 1, 4, 5, 4, 5}));
  EXPECT_EQ(t.column_offsets, (std::vector<std::int64_t>{0, 1, 2, 2, 2, 4, 6}));
  EXPECT_EQ(t.blocks_of_columns, (std::vector<std::int64_t>{0, 1, 2, 4, 3, 5}));
  EXPECT_EQ(t.width(0), 4);
  EXPECT_EQ(t.width(5), 2);
  EXPECT_EQ(make_block_topology({0, 0}, 6, 4).num_rows(), 0);
}

// Values of the blocks as a dense [rows, L * parts * F] matrix, zero outside the topology.
std::vector<double> to_dense(const BlockTopology& t, const std::vector<float>& values, std::int64_t parts) {
  const std::int64_t columns = t.L * parts * t.F;
  std::vector<double> dense(static_cast<std::size_t>(t.num_rows() * columns), 0.0);
  for (std::int64_t b = 0; b < t.num_blocks(); ++b) {
    const std::int64_t column = t.block_column[static_cast<std::size_t>(b)], expert = column / t.columns_per_expert;
    for (std::int64_t i = 0; i < t.block; ++i) {
      for (std::int64_t p = 0; p < parts; ++p) {
        for (std::int64_t j = 0; j < t.width(column); ++j) {
          const std::int64_t to = expert * parts * t.F + p * t.F + column % t.columns_per_expert * t.block + j;
          dense[static_cast<std::size_t>((t.block_row[static_cast<std::size_t>(b)] * t.block + i) * columns + to)] =
              static_cast<double>(values[static_cast<std::size_t>(((b * t.block + i) * parts + p) * t.block + j)]);
        }
      }
    }
  }
  return dense;
}

class BlockProducts : public ::testing::TestWithParam<std::int64_t> {
 protected:
  static constexpr std::int64_t kF = 6, kC = 5, kL = 3;
  BlockTopology topology_ = make_block_topology({3, 0, 9}, kF, GetParam());
  std::int64_t rows_ = topology_.num_rows();
  std::vector<float> dense_ = random_values(static_cast<std::size_t>(rows_ * kC), 11, 1.0f);

  // Row n of the F axis (all parts) of expert e's weights, contraction index c.
  static std::size_t weight_index(WeightPanels::Axis axis, std::int64_t parts, std::int64_t e, std::int64_t n, std::int64_t c) {
    return static_cast<std::size_t>(axis == WeightPanels::Axis::kRows ? (e * parts * kF + n) * kC + c : (e * kC + c) * kF + n);
  }
  static TensorView weight_view(std::vector<float>& w, WeightPanels::Axis axis, std::int64_t parts) {
    return axis == WeightPanels::Axis::kRows ? TensorView::of(w.data(), {kL, parts * kF, kC}) : TensorView::of(w.data(), {kL, kC, kF});
  }
};

TEST_P(BlockProducts, EqualTheDenseFormula) {
  for (const auto& [axis, parts] : {std::pair{WeightPanels::Axis::kRows, std::int64_t{2}}, {WeightPanels::Axis::kRows, 1}, {WeightPanels::Axis::kColumns, 1}}) {
    SCOPED_TRACE(parts);
    ThreadPool pool(2);
    const Stream stream = Stream::cpu(&pool);
    const std::int64_t N = parts * kF, block = topology_.block;
    std::vector<float> w = random_values(static_cast<std::size_t>(kL * N * kC), 12, 1.0f);
    const WeightPanels panels{weight_view(w, axis, parts), axis, parts};
    std::vector<float> values(static_cast<std::size_t>(topology_.num_blocks() * block * parts * block), 99.0f);
    const TensorView value_view = TensorView::of(values.data(), {topology_.num_blocks() * block, parts * block});
    const TensorView dense_view = TensorView::of(dense_.data(), {rows_, kC});
    block_sdd(topology_, dense_view, panels, value_view, stream);
    std::vector<float> back(dense_.size(), 99.0f), d_w(w.size(), 0.5f);
    block_dsd(topology_, value_view, panels, TensorView::of(back.data(), {rows_, kC}), stream);
    block_dds(topology_, dense_view, value_view, {weight_view(d_w, axis, parts), axis, parts}, stream);

    const std::vector<double> sparse = to_dense(topology_, values, parts);
    std::vector<double> expected(sparse.size(), 0.0), expected_back(dense_.size(), 0.0), expected_d_w(w.size(), 0.5);
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t e = topology_.row_expert[static_cast<std::size_t>(r / block)];
      for (std::int64_t n = 0; n < N; ++n) {
        const auto at = static_cast<std::size_t>(r * kL * N + e * N + n);
        for (std::int64_t c = 0; c < kC; ++c) {
          const std::size_t i = weight_index(axis, parts, e, n, c), x = static_cast<std::size_t>(r * kC + c);
          expected[at] += static_cast<double>(dense_[x]) * static_cast<double>(w[i]);
          expected_back[x] += sparse[at] * static_cast<double>(w[i]);
          expected_d_w[i] += sparse[at] * static_cast<double>(dense_[x]);
        }
      }
    }
    EXPECT_LE(relative_error(sparse, expected), 1e-6);
    EXPECT_LE(relative_error(back, expected_back), 2e-6);
    EXPECT_LE(relative_error(d_w, expected_d_w), 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, BlockProducts, ::testing::Values(1, 4, 6, 16), [](const auto& block) { return "block" + std::to_string(block.param); });

}  // namespace
}  // namespace waybill::baselines
