// SPDX-License-Identifier: Apache-2.0
// An activation's gradient in blocks along a row: 1 x 128, 1 x 32, 1 x 16. Grid: 256 threads; a warp takes 256 columns of gate, up and da of a row at a
// time, a lane 8 adjacent ones, which give two pieces of the gradient. Bytes: h and da once, codes and scales once, 4 bytes of a partial sum for 64
// columns; the gradient itself is never written.
#include "ops/quantize/cuda/activated_launch.cuh"
#include "ops/quantize/cuda/activated_piece.cuh"
#include "ops/quantize/cuda/quantize_rows_piece.cuh"

namespace waybill::cuda {
namespace {

using activated_rows::kPieces, activated_rows::kThreads, activated_rows::kWarpColumns, activated_rows::kWarps;

// Of 64 columns, of which this lane holds piece lane % 8; each of its 8 lanes gets it.
__device__ __forceinline__ float block_sum(const float (&sums)[4]) {
  float t[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    t[q] = sums[q];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) t[q] += __shfl_xor_sync(ptx::kFullWarp, t[q], step);
  }
  return (t[0] + t[1]) + (t[2] + t[3]);
}

template <ElementFormat kFormat, bool kDivides, int kBlock>
__global__ void __launch_bounds__(kThreads)
    quantize_gradient_rows(const WideRows x, const ActivatedSource source, const CodedRows out, int segments, bool needs_groups) {
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
    uint4 gate[kPieces], up[kPieces], da[kPieces];
    float weight[kPieces];
    int row[kPieces], column[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      row[i] = (first + i) / segments;
      column[i] = first + i < num_units ? (first + i - row[i] * segments) * kWarpColumns + 8 * lane : source.F;
      const bool is_there = column[i] < source.F;
      const std::int64_t at = row[i] * source.h_stride + column[i];
      gate[i] = load_eight(source.h, at, is_there), up[i] = load_eight(source.h, at + source.F, is_there && gated);
      da[i] = load_eight(source.da, row[i] * source.da_stride + column[i], is_there);
      weight[i] = is_there ? weight_of(source, row[i]) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool is_there = column[i] < source.F;
      const GradientPiece piece = gradient_piece(source, gate[i], up[i], da[i], weight[i]);
      quantize_piece<kFormat, kDivides, kBlock, true>(x.columns, out, needs_groups, table, piece.gate, row[i], column[i], is_there);
      if (gated) quantize_piece<kFormat, kDivides, kBlock, true>(x.columns, out, needs_groups, table, piece.up, row[i], source.F + column[i], is_there);
      if (source.partial_sums == nullptr) continue;
      const float sum = block_sum(piece.sums);
      if (is_there && lane % 8 == 0) source.partial_sums[static_cast<std::int64_t>(row[i]) * source.num_partials + column[i] / kSumColumns] = sum;
    }
  }
}

struct GradientRows {
  template <ElementFormat kFormat, bool kDivides, int kBlock>
  static auto kernel() {
    return quantize_gradient_rows<kFormat, kDivides, kBlock>;
  }
};

}  // namespace

void launch_quantize_gradient_rows(const ActivatedCall& call, const CodedRows& out, cudaStream_t stream) {
  activated_rows::launch<GradientRows>(call, out, stream);
}

}  // namespace waybill::cuda
