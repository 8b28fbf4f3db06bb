// SPDX-License-Identifier: Apache-2.0
// Dequantises blocks along a row (widen.cuh). A lane has 8 adjacent codes of four places under way; a CTA's places are adjacent, so that a warp seldom looks
// for its group anew. Grid: 256 threads, persistent where groups matter. Bytes: codes and scales once, y once.
#include <algorithm>

#include "ops/quantize/cuda/widen.cuh"

namespace waybill::cuda {
namespace {

constexpr int kPieces = 4;

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
__global__ void __launch_bounds__(kThreads) widen_rows(const WideRows y, const CodedRows in, const WidenGrid grid, int iterations) {
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
  int unit = begin * grid.segments + (static_cast<int>(blockIdx.x) * iterations * kWarps + warp) * kPieces;
  int group_begin = 0, group_end = 0;
  float group = 1.0f, reciprocal = 0.0f;
  for (int i = 0; i < iterations && unit < num_units; ++i, unit += kWarps * kPieces) {
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
        reciprocal = group_reciprocal(group);
      }
      if (column[p] >= y.columns) continue;
      const uint4 words = widen_eight<kFormat>(codes[p], scales[p], group, reciprocal);
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(y.data) + row[p] * y.stride + column[p]) = words;
    }
  }
}

template <ElementFormat kFormat>
void launch_rows(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  const WidenGrid grid = widen_grid(y, in);
  const bool needs_groups = in.scale == ScaleFormat::kE4M3;
  const std::int64_t per_cta = kWarps * kPieces, turns = (y.rows * grid.segments + per_cta - 1) / per_cta;
  const std::int64_t ctas = std::min<std::int64_t>(turns, needs_groups ? num_sms() * 8 : turns);
  const auto shared = static_cast<unsigned>(needs_groups ? GroupTable::bytes(y.groups, 1) : 0u);
  widen_rows<kFormat><<<static_cast<unsigned>(ctas), kThreads, shared, stream>>>(y, in, grid, static_cast<int>((turns + ctas - 1) / ctas));
}

}  // namespace

void launch_widen_rows(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  if (in.element == ElementFormat::kE2M1) return launch_rows<ElementFormat::kE2M1>(y, in, stream);
  in.element == ElementFormat::kE4M3 ? launch_rows<ElementFormat::kE4M3>(y, in, stream) : launch_rows<ElementFormat::kE5M2>(y, in, stream);
}

}  // namespace waybill::cuda
