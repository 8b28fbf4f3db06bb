// SPDX-License-Identifier: Apache-2.0
// Dequantises blocks of 32 or 128 rows x 1 (widen.cuh). A lane takes 8 rows of 8 columns under one set of scales. Grid: persistent, 256 threads. Bytes: codes
// and scales once, y once.
#include <algorithm>

#include "ops/quantize/cuda/widen.cuh"

namespace waybill::cuda {
namespace {

constexpr int kStripRows = 8;

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
void launch_columns(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  const WidenGrid grid = widen_grid(y, in);
  const std::int64_t units = (y.rows / kStripRows + y.groups * (in.block_rows / kStripRows)) * grid.segments;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + kWarps - 1) / kWarps, num_sms() * 8));
  widen_columns<kFormat>
      <<<ctas, kThreads, static_cast<unsigned>(GroupTable::bytes(y.groups, 1)), stream>>>(y, in, grid, std::countr_zero(static_cast<unsigned>(in.block_rows)));
}

}  // namespace

void launch_widen_columns(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  in.element == ElementFormat::kE4M3 ? launch_columns<ElementFormat::kE4M3>(y, in, stream) : launch_columns<ElementFormat::kE5M2>(y, in, stream);
}

}  // namespace waybill::cuda
