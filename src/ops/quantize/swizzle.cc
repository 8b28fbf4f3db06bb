// SPDX-License-Identifier: Apache-2.0
// Scales in tiles of 128 rows x 4 columns, the order block-scaled tensor cores read.
#include <cstring>

#include "waybill/quantize.h"

namespace waybill {
namespace {

constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTileBytes = kTileRows * kTileColumns;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void check_scales(const SwizzledLayout& layout, const TensorView& scales) {
  std::int64_t rows = 0;
  for (const std::int64_t group_rows : layout.rows) rows += group_rows;
  WB_CHECK(scales.rank == 2 && scales.shape[0] >= rows && scales.shape[1] == layout.columns && scales.dtype == DType::kU8,
           "swizzled scales: expected u8 [{}, {}], got {}", rows, layout.columns, scales.describe());
}

}  // namespace

std::int64_t SwizzledLayout::index(std::int64_t g, std::int64_t row, std::int64_t column) const {
  const std::int64_t tile = row / kTileRows * (padded_columns / kTileColumns) + column / kTileColumns;
  return byte_offsets[static_cast<std::size_t>(g)] + tile * kTileBytes + row % 32 * 16 + row / 32 % 4 * 4 + column % kTileColumns;
}

SwizzledLayout swizzled_layout(const TensorView& offsets, std::int64_t columns) {
  WB_CHECK(columns >= 0, "swizzled scales: the number of columns is negative: {}", columns);
  const std::vector<std::int64_t> first = block_row_offsets(offsets, 1);
  SwizzledLayout layout;
  layout.columns = columns;
  layout.padded_columns = round_up(columns, kTileColumns);
  layout.byte_offsets.push_back(0);
  for (std::size_t g = 0; g + 1 < first.size(); ++g) {
    layout.rows.push_back(first[g + 1] - first[g]);
    layout.padded_rows.push_back(round_up(layout.rows.back(), kTileRows));
    layout.byte_offsets.push_back(layout.byte_offsets.back() + layout.padded_rows.back() * layout.padded_columns);
  }
  return layout;
}

void swizzle_scales(const SwizzledLayout& layout, const TensorView& scales, std::uint8_t* out) {
  check_scales(layout, scales);
  if (layout.byte_offsets.back() > 0) std::memset(out, 0, static_cast<std::size_t>(layout.byte_offsets.back()));
  const std::uint8_t* in = static_cast<const std::uint8_t*>(scales.data);
  for (std::size_t g = 0; g < layout.rows.size(); ++g) {
    for (std::int64_t row = 0; row < layout.rows[g]; ++row, in += scales.stride[0]) {
      for (std::int64_t c = 0; c < layout.columns; ++c) out[layout.index(static_cast<std::int64_t>(g), row, c)] = in[c];
    }
  }
}

void unswizzle_scales(const SwizzledLayout& layout, const std::uint8_t* in, const TensorView& scales) {
  check_scales(layout, scales);
  std::uint8_t* out = static_cast<std::uint8_t*>(scales.data);
  for (std::size_t g = 0; g < layout.rows.size(); ++g) {
    for (std::int64_t row = 0; row < layout.rows[g]; ++row, out += scales.stride[0]) {
      for (std::int64_t c = 0; c < layout.columns; ++c) out[c] = in[layout.index(static_cast<std::int64_t>(g), row, c)];
    }
  }
}

}  // namespace waybill
