// SPDX-License-Identifier: Apache-2.0
// Blocks along a row: 1 x 128, 1 x 32, 1 x 16. Grid: persistent, 256 threads; a warp takes 256 columns of a row at a time, four of them under
// way together, a lane 8 adjacent columns, and the lanes of a block find its largest magnitude by shuffles. Rows are independent, so groups
// matter for the number of rows, NVFP4's group scales and swizzled scales only. Bytes: x once, codes and scales once.
#include <algorithm>

#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/quantize_rows_piece.cuh"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256;

template <bool kIsBf16>
constexpr int kUnderWay = kIsBf16 ? 4 : 2;  // pieces of a lane

struct RowsGrid {
  int segments;  // of kWarpColumns a row
  bool needs_groups;
};

template <ElementFormat kFormat, bool kDivides, int kBlock, bool kIsBf16>
__global__ void __launch_bounds__(kThreads) quantize_rows(const WideRows x, const CodedRows out, const RowsGrid grid) {
  extern __shared__ int memory[];
  GroupTable table;
  int rows = static_cast<int>(x.rows);
  if (grid.needs_groups) {
    table.build<128>(x, memory);
    rows = table.rows();
  } else if (x.offsets != nullptr) {
    rows = min(max(__ldg(x.offsets + x.groups), 0), rows);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, num_units = rows * grid.segments;
  constexpr int kPieces = kUnderWay<kIsBf16>;
  const int step = static_cast<int>(gridDim.x) * kWarps * kPieces;
  for (int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kPieces; first < num_units; first += step) {
    Piece<kIsBf16> pieces[kPieces];
    int row[kPieces], column[kPieces], source[kPieces];
    row[0] = first / grid.segments;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i > 0) row[i] = row[i - 1];
      int segment = first + i - row[i] * grid.segments;
      if (segment >= grid.segments) ++row[i], segment -= grid.segments;
      column[i] = first + i < num_units ? segment * kWarpColumns + 8 * lane : x.columns;
      source[i] = row[i];
    }
    if (x.list != nullptr) {  // apart from the loads of values, which wait for each other else
#pragma unroll
      for (int i = 0; i < kPieces; ++i) source[i] = column[i] < x.columns ? __ldg(x.list + row[i]) : -1;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i].load(x.data, source[i] * x.stride + column[i], source[i] >= 0 && column[i] < x.columns);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      quantize_piece<kFormat, kDivides, kBlock, kIsBf16>(x.columns, out, grid.needs_groups, table, pieces[i], row[i], column[i], column[i] < x.columns);
    }
  }
}

template <ElementFormat kFormat, bool kDivides, int kBlock>
void launch(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  const RowsGrid grid{(x.columns + kWarpColumns - 1) / kWarpColumns, out.group_scales != nullptr || out.swizzled != nullptr};
  const std::int64_t units = x.rows * grid.segments, per_cta = kWarps * (x.is_bf16 ? kUnderWay<true> : kUnderWay<false>);
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + per_cta - 1) / per_cta, grid.needs_groups ? num_sms() * 8 : 1 << 30));
  const auto shared = static_cast<unsigned>(grid.needs_groups ? GroupTable::bytes(x.groups, 1) : 0u);
  const auto kernel = x.is_bf16 ? quantize_rows<kFormat, kDivides, kBlock, true> : quantize_rows<kFormat, kDivides, kBlock, false>;
  allow_shared(kernel, shared);
  kernel<<<ctas, kThreads, shared, stream>>>(x, out, grid);
}

template <ElementFormat kFormat>
void launch_fp8(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  const bool divides = out.scale == ScaleFormat::kF32;
  if (out.block_columns == 32) {
    divides ? launch<kFormat, true, 32>(x, out, stream) : launch<kFormat, false, 32>(x, out, stream);
  } else {
    divides ? launch<kFormat, true, 128>(x, out, stream) : launch<kFormat, false, 128>(x, out, stream);
  }
}

}  // namespace

void launch_quantize_rows(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  if (x.rows == 0 || x.columns == 0 || x.groups == 0) return;
  if (out.element == ElementFormat::kE4M3) launch_fp8<ElementFormat::kE4M3>(x, out, stream);
  if (out.element == ElementFormat::kE5M2) launch_fp8<ElementFormat::kE5M2>(x, out, stream);
  if (out.element == ElementFormat::kE2M1) launch<ElementFormat::kE2M1, true, 16>(x, out, stream);
}

}  // namespace waybill::cuda
