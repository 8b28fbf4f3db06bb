// SPDX-License-Identifier: Apache-2.0
// The largest number of each group of rotated values: NVFP4's first pass before rotated columns (qdq_columns.cu). Grid: persistent, 256 threads. Bytes: x once.
#include "ops/quantize/cuda/qdq_tile.cuh"

namespace waybill::cuda {
namespace {

// A NaN counts for nothing, it spoils its block only.
__global__ void __launch_bounds__(kThreads, 2) qdq_rotated_largest(const __grid_constant__ QdqCall p) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<kRows, kLaneRows>(p.x, memory);
  const auto signs = static_cast<std::uint16_t>(random_u64(seed_of(p), kHadamardStream + p.draws));
  const int column_tiles = (p.x.columns + kColumns - 1) / kColumns;
  const std::int64_t units = static_cast<std::int64_t>(table.num_blocks()) * column_tiles;
  for (std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; unit < units;
       unit += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    Values x;
    const Place at = load(p, table, unit, column_tiles, x);
    std::uint32_t amax = 0;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      float v[kLaneRows];
      take_column(x, c, true, signs, v);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const std::uint32_t magnitude = __float_as_uint(v[i]) & kMagnitudeBits;
        if (magnitude <= kInfinityBits) amax = max(amax, magnitude);
      }
    }
    amax = ptx::redux_max(amax);
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<std::uint32_t*>(p.group_scales) + at.group, amax);
  }
}

}  // namespace

void launch_qdq_rotated_largest(const QdqCall& p, cudaStream_t stream) { launch_tiles(qdq_rotated_largest, p, stream); }

}  // namespace waybill::cuda
