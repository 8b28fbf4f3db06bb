// SPDX-License-Identifier: Apache-2.0
#include "baselines/block_matrix.h"

#include <algorithm>

#include "waybill/grouped_gemm.h"

namespace waybill::baselines {
namespace {

// A [rows, columns] part of a row-major matrix.
TensorView part(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  TensorView view = TensorView::of(data, {rows, columns});
  view.stride[0] = stride;
  return view;
}

// Part p of block column `column` of the weights.
TensorView panel(const WeightPanels& w, const BlockTopology& t, std::int64_t column, std::int64_t p) {
  const std::int64_t expert = column / t.columns_per_expert, first = column % t.columns_per_expert * t.block, width = t.width(column);
  float* data = w.weights.as<float>() + expert * w.weights.shape[1] * w.weights.shape[2];
  if (w.axis == WeightPanels::Axis::kRows) {
    const std::int64_t C = w.weights.shape[2];
    return part(data + (p * t.F + first) * C, width, C, C);
  }
  return part(data + first, w.weights.shape[1], width, t.F);
}

TensorView block_of(const BlockTopology& t, const TensorView& values, std::int64_t index, std::int64_t parts, std::int64_t p) {
  return part(values.as<float>() + (index * t.block * parts + p) * t.block, t.block, t.width(t.block_column[static_cast<std::size_t>(index)]), parts * t.block);
}

TensorView rows_of(const BlockTopology& t, const TensorView& dense, std::int64_t row_block) {
  return dense.rows(row_block * t.block, (row_block + 1) * t.block);
}

}  // namespace

std::int64_t BlockTopology::width(std::int64_t column) const { return std::min(block, F - column % columns_per_expert * block); }

BlockTopology make_block_topology(const std::vector<std::int64_t>& counts, std::int64_t F, std::int64_t block) {
  BlockTopology t;
  t.block = block;
  t.L = static_cast<std::int64_t>(counts.size());
  t.F = F;
  t.columns_per_expert = (F + block - 1) / block;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    t.starts.push_back(t.num_rows());
    t.row_expert.insert(t.row_expert.end(), static_cast<std::size_t>((counts[e] + block - 1) / block), static_cast<std::int32_t>(e));
  }
  t.row_offsets.push_back(0);
  for (std::size_t r = 0; r < t.row_expert.size(); ++r) {
    for (std::int64_t c = 0; c < t.columns_per_expert; ++c) {
      t.block_row.push_back(static_cast<std::int32_t>(r));
      t.block_column.push_back(static_cast<std::int32_t>(t.row_expert[r] * t.columns_per_expert + c));
    }
    t.row_offsets.push_back(t.num_blocks());
  }
  // The transposed order, by counting sort.
  t.column_offsets.assign(static_cast<std::size_t>(t.L * t.columns_per_expert) + 1, 0);
  for (const std::int32_t column : t.block_column) ++t.column_offsets[static_cast<std::size_t>(column) + 1];
  for (std::size_t c = 1; c < t.column_offsets.size(); ++c) t.column_offsets[c] += t.column_offsets[c - 1];
  std::vector<std::int64_t> next(t.column_offsets.begin(), t.column_offsets.end() - 1);
  t.blocks_of_columns.resize(t.block_column.size());
  for (std::size_t b = 0; b < t.block_column.size(); ++b) {
    t.blocks_of_columns[static_cast<std::size_t>(next[static_cast<std::size_t>(t.block_column[b])]++)] = static_cast<std::int64_t>(b);
  }
  return t;
}

void block_sdd(const BlockTopology& t, const TensorView& dense, const WeightPanels& w, const TensorView& values, Stream stream) {
  parallel_for(stream.pool, t.num_blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t column = t.block_column[static_cast<std::size_t>(b)], width = t.width(column);
      const TensorView rows = rows_of(t, dense, t.block_row[static_cast<std::size_t>(b)]);
      if (width < t.block) std::fill_n(values.as<float>() + b * t.block * w.parts * t.block, t.block * w.parts * t.block, 0.0f);
      for (std::int64_t p = 0; p < w.parts; ++p) {
        gemm({.a = rows, .b = panel(w, t, column, p), .c = block_of(t, values, b, w.parts, p), .transpose_b = w.axis == WeightPanels::Axis::kRows});
      }
    }
  });
}

void block_dsd(const BlockTopology& t, const TensorView& values, const WeightPanels& w, const TensorView& dense, Stream stream) {
  parallel_for(stream.pool, t.num_row_blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const TensorView rows = rows_of(t, dense, r);
      for (std::int64_t b = t.row_offsets[static_cast<std::size_t>(r)]; b < t.row_offsets[static_cast<std::size_t>(r) + 1]; ++b) {
        const std::int64_t column = t.block_column[static_cast<std::size_t>(b)];
        for (std::int64_t p = 0; p < w.parts; ++p) {
          const bool first = b == t.row_offsets[static_cast<std::size_t>(r)] && p == 0;
          gemm({.a = block_of(t, values, b, w.parts, p),
                .b = panel(w, t, column, p),
                .c = rows,
                .transpose_b = w.axis == WeightPanels::Axis::kColumns,
                .accumulate = !first});
        }
      }
    }
  });
}

void block_dds(const BlockTopology& t, const TensorView& dense, const TensorView& values, const WeightPanels& w, Stream stream) {
  parallel_for(stream.pool, t.L * t.columns_per_expert, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t column = begin; column < end; ++column) {
      for (std::int64_t i = t.column_offsets[static_cast<std::size_t>(column)]; i < t.column_offsets[static_cast<std::size_t>(column) + 1]; ++i) {
        const std::int64_t b = t.blocks_of_columns[static_cast<std::size_t>(i)];
        const TensorView rows = rows_of(t, dense, t.block_row[static_cast<std::size_t>(b)]);
        for (std::int64_t p = 0; p < w.parts; ++p) {
          const TensorView block = block_of(t, values, b, w.parts, p), target = panel(w, t, column, p);
          const bool by_rows = w.axis == WeightPanels::Axis::kRows;
          gemm({.a = by_rows ? block : rows, .b = by_rows ? rows : block, .c = target, .transpose_a = true, .accumulate = true});
        }
      }
    }
  });
}

}  // namespace waybill::baselines
