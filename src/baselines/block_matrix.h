// SPDX-License-Identifier: Apache-2.0
// Block-sparse matmuls for experts: the rows of an expert meet only its own columns, so in [all rows, all experts' columns] the
// non-zero blocks are known from the routes. Three products, named by what is sparse in "result = left x right":
//   SDD  sparse = dense x dense     DSD  dense = sparse x dense     DDS  dense = dense x sparse
// Worked example (the test uses these numbers): counts = {3, 0, 5}, block 4, F = 6: rows begin at {0, 4, 4}, 12 in all; row blocks belong
// to experts {0, 2, 2}; every expert has 2 column blocks (4 and 2 columns wide), so block columns are row_block -> {0,1}, {4,5}, {4,5}.
#pragma once

#include <cstdint>
#include <vector>

#include "waybill/stream.h"
#include "waybill/tensor.h"

namespace waybill::baselines {

// CSR over row blocks, and the same blocks by column for the products that sum over rows.
struct BlockTopology {
  std::int64_t block = 0, L = 0, F = 0;
  std::int64_t columns_per_expert = 0;          // blocks
  std::vector<std::int64_t> starts;             // [L] first row of an expert: a multiple of block
  std::vector<std::int32_t> row_expert;         // [row blocks]
  std::vector<std::int64_t> row_offsets;        // [row blocks + 1]
  std::vector<std::int32_t> block_row;          // [blocks]
  std::vector<std::int32_t> block_column;       // [blocks] expert * columns_per_expert + column
  std::vector<std::int64_t> column_offsets;     // [L * columns_per_expert + 1]
  std::vector<std::int64_t> blocks_of_columns;  // [blocks] ascending row within a column

  std::int64_t num_row_blocks() const { return static_cast<std::int64_t>(row_expert.size()); }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(block_row.size()); }
  std::int64_t num_rows() const { return num_row_blocks() * block; }
  std::int64_t width(std::int64_t column) const;  // columns of a block; the last of an expert may be narrow
};
// counts [L]: rows of each expert, rounded up to whole blocks.
BlockTopology make_block_topology(const std::vector<std::int64_t>& counts, std::int64_t F, std::int64_t block);

// The dense matrix on the other side: weights of all experts, cut into columns of `block` of the F axis.
//   kRows:    [L, parts * F, C]  F is the rows (parts = 2: gate then up, which stand beside each other in a block)
//   kColumns: [L, C, F]          F is the columns
struct WeightPanels {
  enum class Axis : std::uint8_t { kRows, kColumns };
  TensorView weights;
  Axis axis = Axis::kRows;
  std::int64_t parts = 1;
};

// values [blocks * block, parts * block] hold each block row-major; columns past a narrow block's width are 0.
// values = dense x panels^T (kRows) or dense x panels (kColumns).   dense [rows, C]
void block_sdd(const BlockTopology& topology, const TensorView& dense, const WeightPanels& panels, const TensorView& values, Stream stream);
// dense = values x panels (kRows) or values x panels^T (kColumns). dense [rows, C] is written.
void block_dsd(const BlockTopology& topology, const TensorView& values, const WeightPanels& panels, const TensorView& dense, Stream stream);
// d_panels += values^T x dense (kRows) or dense^T x values (kColumns): the weights' gradient. Sums run over rows, ascending.
void block_dds(const BlockTopology& topology, const TensorView& dense, const TensorView& values, const WeightPanels& d_panels, Stream stream);

}  // namespace waybill::baselines
