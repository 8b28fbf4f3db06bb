// SPDX-License-Identifier: Apache-2.0
// An activation's result in blocks along a row: 1 x 128, 1 x 32, 1 x 16. Grid: 256 threads; a warp takes 256 columns of a row at a time, several of them
// under way together, a lane 8 adjacent columns of gate and of up. Bytes: h once, codes and scales once; the result itself is never written.
#include "ops/quantize/cuda/activated_launch.cuh"
#include "ops/quantize/cuda/activated_piece.cuh"
#include "ops/quantize/cuda/quantize_rows_piece.cuh"

namespace waybill::cuda {
namespace {

using activated_rows::kPieces, activated_rows::kThreads, activated_rows::kWarpColumns, activated_rows::kWarps;

template <ElementFormat kFormat, bool kDivides, int kBlock>
__global__ void __launch_bounds__(kThreads)
    quantize_activated_rows(const WideRows x, const ActivatedSource source, const CodedRows out, int segments, bool needs_groups) {
  extern __shared__ int memory[];
  GroupTable table;
  int rows = static_cast<int>(x.rows);
  if (needs_groups) {
    table.build<128>(x, memory);
    rows = table.rows();
  } else if (x.offsets != nullptr) {
    rows = min(max(__ldg(x.offsets + x.groups), 0), rows);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, num_units = rows * segments;
  const int step = static_cast<int>(gridDim.x) * kWarps * kPieces;
  const bool gated = is_gated(source);
  for (int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kPieces; first < num_units; first += step) {
    uint4 gate[kPieces], up[kPieces];
    float weight[kPieces];
    int row[kPieces], column[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      row[i] = (first + i) / segments;
      column[i] = first + i < num_units ? (first + i - row[i] * segments) * kWarpColumns + 8 * lane : source.F;
      const bool is_there = column[i] < source.F;
      const std::int64_t at = row[i] * source.h_stride + column[i];
      gate[i] = load_eight(source.h, at, is_there), up[i] = load_eight(source.h, at + source.F, is_there && gated);
      weight[i] = is_there ? weight_of(source, row[i]) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      quantize_piece<kFormat, kDivides, kBlock, true>(source.F, out, needs_groups, table, activated_piece(source, gate[i], up[i], weight[i]), row[i], column[i],
                                                      column[i] < source.F);
    }
  }
}

struct ActivatedRows {
  template <ElementFormat kFormat, bool kDivides, int kBlock>
  static auto kernel() {
    return quantize_activated_rows<kFormat, kDivides, kBlock>;
  }
};

}  // namespace

void launch_quantize_activated_rows(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream) {
  activated_rows::launch<ActivatedRows>(call, out, stream);
}

}  // namespace waybill::cuda
