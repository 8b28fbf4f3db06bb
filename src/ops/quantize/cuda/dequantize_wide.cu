// SPDX-License-Identifier: Apache-2.0
// The common cases of dequantize.cu at the speed of a copy: bf16 results, widths in eights; 8 bits under byte scales of powers of two, or NVFP4.
// Bits: those of dequantize.cu.
//
// widen_rows     blocks along a row. A lane has 8 adjacent codes of four places under way; a CTA's places are adjacent, so that a warp seldom looks for
//                its group anew
// widen_columns  blocks of 32 or 128 rows x 1. A lane takes 8 rows of 8 columns under one set of scales
// Grids: persistent where groups matter, 256 threads. Bytes: codes and scales once, y once.
#include <algorithm>
#include <bit>

#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/wide_codes.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256, kPieces = 4, kStripRows = 8;

struct WidenGrid {
  int segments;              // of kWarpColumns a row
  std::uint32_t multiplier;  // unit / segments = high(unit * multiplier) >> shift for units below 2^31; 0: segments is 1
  int shift, column_shift;   // log2 of the block's columns
  int iterations;            // of a CTA
  bool needs_groups;
  __device__ __forceinline__ int row_of(int unit) const {
    return multiplier == 0 ? unit : static_cast<int>(__umulhi(static_cast<std::uint32_t>(unit), multiplier) >> shift);
  }
};

WidenGrid widen_grid(const WideRows& y, const CodedRows& in) {
  WidenGrid grid{};
  grid.segments = (y.columns + kWarpColumns - 1) / kWarpColumns;
  if (grid.segments > 1) {
    const int bits = std::bit_width(static_cast<unsigned>(grid.segments - 1));
    grid.shift = bits - 1;
    grid.multiplier =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + static_cast<unsigned>(grid.segments) - 1) / static_cast<unsigned>(grid.segments));
  }
  grid.column_shift = std::countr_zero(static_cast<unsigned>(in.block_columns));
  grid.needs_groups = in.scale == ScaleFormat::kE4M3;
  return grid;
}

// The value of a code that has no short way, by the ways of dequantize.cu.
template <ElementFormat kFormat>
__device__ __forceinline__ uint4 widen_singly(uint2 codes, uint2 scales) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t code = (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)) & 0xffu, scale = (i < 4 ? scales.x : scales.y) >> (8 * (i % 4)) & 0xffu;
    const std::uint32_t bits = bf16_bits(__fmul_rn(decode_one<kFormat>(code), decode_e8m0_bits(scale)));
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <ElementFormat kFormat>
__device__ __forceinline__ uint4 widen_under(uint2 codes, const std::uint32_t (&scales)[4]) {
  return make_uint4(multiply_pairs(widen_pair<kFormat>(spread_low(codes.x)), scales[0]), multiply_pairs(widen_pair<kFormat>(spread_high(codes.x)), scales[1]),
                    multiply_pairs(widen_pair<kFormat>(spread_low(codes.y)), scales[2]), multiply_pairs(widen_pair<kFormat>(spread_high(codes.y)), scales[3]));
}

template <ElementFormat kFormat>
__device__ __forceinline__ uint4 widen_eight(uint2 codes, std::uint32_t scale, float group, float reciprocal) {
  if constexpr (kFormat == ElementFormat::kE2M1) {
    const E2m1Values values = E2m1Values::of(decode_one<ElementFormat::kE4M3>(scale), group, reciprocal);
    const uint2 low = values.four(codes.x), high = values.four(codes.x >> 16);
    return make_uint4(low.x, low.y, high.x, high.y);
  } else {
    if (has_special<kFormat>(codes.x) || has_special<kFormat>(codes.y))
      return widen_singly<kFormat>(codes, make_uint2(scale * 0x01010101u, scale * 0x01010101u));
    const std::uint32_t pair = both(e8m0_half(scale));
    return widen_under<kFormat>(codes, {pair, pair, pair, pair});
  }
}

template <ElementFormat kFormat>
__global__ void __launch_bounds__(kThreads) widen_rows(const WideRows y, const CodedRows in, const WidenGrid grid) {
  constexpr bool kHasGroups = kFormat == ElementFormat::kE2M1;
  extern __shared__ int memory[];
  GroupTable table;
  int begin = 0, rows = static_cast<int>(y.rows);
  if constexpr (kHasGroups) {
    table.build<1>(y, memory);
    rows = table.rows(), begin = table.first_row(0);
  } else if (y.offsets != nullptr) {
    rows = min(max(__ldg(y.offsets + y.groups), 0), rows), begin = min(max(__ldg(y.offsets), 0), rows);
  }
  rows = static_cast<int>(min(static_cast<std::int64_t>(rows), in.scale_rows));
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, num_units = rows * grid.segments;
  int unit = begin * grid.segments + (static_cast<int>(blockIdx.x) * grid.iterations * kWarps + warp) * kPieces;
  int group_begin = 0, group_end = 0;
  float group = 1.0f, reciprocal = 0.0f;
  for (int i = 0; i < grid.iterations && unit < num_units; ++i, unit += kWarps * kPieces) {
    uint2 codes[kPieces];
    std::uint32_t scales[kPieces];
    int row[kPieces], column[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      row[p] = grid.row_of(unit + p);
      column[p] = unit + p < num_units ? (unit + p - row[p] * grid.segments) * kWarpColumns + 8 * lane : y.columns;
      if (column[p] >= y.columns) continue;
      const std::uint8_t* at = in.codes + row[p] * in.code_stride;
      codes[p] =
          kFormat == ElementFormat::kE2M1 ? make_uint2(__ldg(reinterpret_cast<const unsigned*>(at + column[p] / 2)), 0) : ptx::ld_stream_v2(at + column[p]);
      scales[p] = __ldg(static_cast<const std::uint8_t*>(in.scales) + row[p] * in.scale_stride + (column[p] >> grid.column_shift) * in.scale_column_stride);
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (kHasGroups && unit + p < num_units && (row[p] < group_begin || row[p] >= group_end)) {
        const int g = table.group_of_row(row[p]);
        group_begin = table.first_row(g), group_end = table.end_row(g), group = __ldg(in.group_scales + g);
        reciprocal = group >= 0x1p-80f && group <= 0x1p100f ? __frcp_rn(group) : 0.0f;
      }
      if (column[p] >= y.columns) continue;
      const uint4 words = widen_eight<kFormat>(codes[p], scales[p], group, reciprocal);
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(y.data) + row[p] * y.stride + column[p]) = words;
    }
  }
}

template <ElementFormat kFormat>
__global__ void __launch_bounds__(kThreads) widen_columns(const WideRows y, const CodedRows in, const WidenGrid grid, int row_shift) {
  extern __shared__ int memory[];
  GroupTable table;
  row_shift == 5 ? table.build<32>(y, memory) : table.build<128>(y, memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, strip_shift = row_shift - 3;
  const int num_units = (min(table.num_blocks(), static_cast<int>(min(in.scale_rows, std::int64_t{1} << 30))) << strip_shift) * grid.segments;
  for (int unit = static_cast<int>(blockIdx.x) * kWarps + warp; unit < num_units; unit += static_cast<int>(gridDim.x) * kWarps) {
    const int strip = grid.row_of(unit), column = (unit - strip * grid.segments) * kWarpColumns + 8 * lane, block = strip >> strip_shift;
    const int g = table.group_of_block(block);
    const int row0 = table.first_row(g) + ((block - table.first_block(g)) << row_shift) + (strip & ((1 << strip_shift) - 1)) * kStripRows;
    const int valid = min(table.end_row(g) - row0, kStripRows);
    if (column >= y.columns || valid <= 0) continue;
    uint2 codes[kStripRows] = {};
    const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(in.scales) + block * in.scale_stride + column));
    const std::uint8_t* from = in.codes + row0 * in.code_stride + column;
    std::uint16_t* to = static_cast<std::uint16_t*>(y.data) + row0 * y.stride + column;
    bool is_hard = has_odd_scale(bytes.x) || has_odd_scale(bytes.y);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      if (i < valid) codes[i] = ptx::ld_stream_v2(from + i * in.code_stride);
    }
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) is_hard = is_hard || has_special<kFormat>(codes[i].x) || has_special<kFormat>(codes[i].y);
    if (is_hard) {
#pragma unroll 1
      for (int i = 0; i < valid; ++i) *reinterpret_cast<uint4*>(to + i * y.stride) = widen_singly<kFormat>(ptx::ld_stream_v2(from + i * in.code_stride), bytes);
      continue;
    }
    const std::uint32_t scales[4] = {spread_low(bytes.x) >> 1, spread_high(bytes.x) >> 1, spread_low(bytes.y) >> 1, spread_high(bytes.y) >> 1};
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      if (i < valid) *reinterpret_cast<uint4*>(to + i * y.stride) = widen_under<kFormat>(codes[i], scales);
    }
  }
}

template <ElementFormat kFormat>
void launch_rows(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  WidenGrid grid = widen_grid(y, in);
  const std::int64_t per_cta = kWarps * kPieces, turns = (y.rows * grid.segments + per_cta - 1) / per_cta;
  const std::int64_t ctas = std::min<std::int64_t>(turns, grid.needs_groups ? 132 * 8 : turns);
  grid.iterations = static_cast<int>((turns + ctas - 1) / ctas);
  const auto shared = static_cast<unsigned>(grid.needs_groups ? GroupTable::bytes(y.groups, 1) : 0u);
  widen_rows<kFormat><<<static_cast<unsigned>(ctas), kThreads, shared, stream>>>(y, in, grid);
}

template <ElementFormat kFormat>
void launch_columns(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  const WidenGrid grid = widen_grid(y, in);
  const std::int64_t units = (y.rows / kStripRows + y.groups * (in.block_rows / kStripRows)) * grid.segments;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + kWarps - 1) / kWarps, 132 * 8));
  widen_columns<kFormat>
      <<<ctas, kThreads, static_cast<unsigned>(GroupTable::bytes(y.groups, 1)), stream>>>(y, in, grid, std::countr_zero(static_cast<unsigned>(in.block_rows)));
}

bool are_aligned(const WideRows& y, const CodedRows& in) {
  const int code_bytes = in.element == ElementFormat::kE2M1 ? 4 : 8;
  return y.is_bf16 && reinterpret_cast<std::uintptr_t>(y.data) % 16 == 0 && y.stride % 8 == 0 && y.columns % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(in.codes) % static_cast<unsigned>(code_bytes) == 0 && in.code_stride % code_bytes == 0;
}

}  // namespace

bool launch_dequantize_wide(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  if (!are_aligned(y, in) || y.rows * ((y.columns + kWarpColumns - 1) / kWarpColumns) > std::int64_t{1} << 30) return false;
  const bool is_row = in.block_rows == 1 && in.block_columns % 8 == 0 && std::has_single_bit(static_cast<unsigned>(in.block_columns));
  if (in.element == ElementFormat::kE2M1) {
    if (!is_row || in.scale != ScaleFormat::kE4M3) return false;
    launch_rows<ElementFormat::kE2M1>(y, in, stream);
    return true;
  }
  if (in.scale != ScaleFormat::kE8M0) return false;
  const bool is_e4m3 = in.element == ElementFormat::kE4M3;
  if (is_row) {
    is_e4m3 ? launch_rows<ElementFormat::kE4M3>(y, in, stream) : launch_rows<ElementFormat::kE5M2>(y, in, stream);
    return true;
  }
  const bool is_column = (in.block_rows == 32 || in.block_rows == 128) && in.block_columns == 1 && in.scale_column_stride == 1 && in.scale_stride % 8 == 0 &&
                         reinterpret_cast<std::uintptr_t>(in.scales) % 8 == 0;
  if (!is_column) return false;
  is_e4m3 ? launch_columns<ElementFormat::kE4M3>(y, in, stream) : launch_columns<ElementFormat::kE5M2>(y, in, stream);
  return true;
}

}  // namespace waybill::cuda
