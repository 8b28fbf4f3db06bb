// SPDX-License-Identifier: Apache-2.0
// NVFP4's scale of a group of an activation's result or gradient: the first pass of group_scales.cu, over h (and da). Grid: persistent, 256 threads; a
// warp takes 256 columns of a row at a time. A NaN counts for nothing here: it spoils its block only. Bytes: h (and da) once.
#include "ops/quantize/cuda/activated_piece.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256;

__device__ __forceinline__ std::uint32_t largest_number(const Piece<true>& piece) {
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t magnitude = __float_as_uint(piece.value(i)) & kMagnitudeBits;
    if (magnitude <= kInfinityBits) amax = max(amax, magnitude);
  }
  return amax;
}

template <bool kIsGradient>
__global__ void __launch_bounds__(kThreads) activated_group_scales(const WideRows x, const ActivatedSource source, std::uint32_t* amax_bits, int segments) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<0>(x, memory);
  const int lane = static_cast<int>(threadIdx.x) % 32, num_units = table.rows() * segments;
  const bool gated = is_gated(source);
  for (int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; unit < num_units; unit += static_cast<int>(gridDim.x) * kWarps) {
    const int row = unit / segments, column = (unit - row * segments) * kWarpColumns + 8 * lane;
    const bool is_there = column < source.F;
    const std::int64_t at = row * source.h_stride + column;
    const uint4 gate = load_eight(source.h, at, is_there), up = load_eight(source.h, at + source.F, is_there && gated);
    const float weight = is_there ? weight_of(source, row) : 1.0f;
    std::uint32_t amax = 0;
    if constexpr (kIsGradient) {
      const GradientPiece piece = gradient_piece(source, gate, up, load_eight(source.da, row * source.da_stride + column, is_there), weight);
      amax = max(largest_number(piece.gate), largest_number(piece.up));
    } else {
      amax = largest_number(activated_piece(source, gate, up, weight));
    }
    amax = ptx::redux_max(amax);
    if (lane == 0) atomicMax(amax_bits + table.group_of_row(row), amax);
  }
}

}  // namespace

void launch_activated_group_scales(const ActivatedCall& call, float* group_scales, cudaStream_t stream) {
  if (call.x.groups == 0) return;
  if (call.x.rows > 0 && call.x.columns > 0) {
    const auto kernel = call.is_gradient ? activated_group_scales<true> : activated_group_scales<false>;
    const int segments = (call.source.F + kWarpColumns - 1) / kWarpColumns;
    kernel<<<static_cast<unsigned>(num_sms() * 8), kThreads, static_cast<unsigned>(GroupTable::bytes(call.x.groups, 0)), stream>>>(
        call.x, call.source, reinterpret_cast<std::uint32_t*>(group_scales), segments);
  }
  launch_group_scales_finish(group_scales, call.x.groups, stream);
}

}  // namespace waybill::cuda
