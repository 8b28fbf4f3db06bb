// SPDX-License-Identifier: Apache-2.0
// Dense maps: rows and slots of every (tile of tokens, rank). Grid (P plan_tiles, ranks), 512 threads. Bytes: P T E read.
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/map_tile.cuh"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(kPlanThreads) exchange_map_count(const __grid_constant__ ExchangeParams q, const MapWindows map) {
  extern __shared__ int counts[];  // [64][P]
  const ExchangeShape& shape = q.shape;
  const int rank = q.ranks.rank[blockIdx.y], P = shape.P, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  count_map_tile(q, map, rank, map_tile(q, map, rank), counts);
  int* tiles = q.window<int>(rank, map.tiles) + blockIdx.x;
  for (int r = warp; r < P; r += kPlanWarps) {
    const unsigned a = static_cast<unsigned>(counts[lane * P + r]), b = static_cast<unsigned>(counts[(lane + 32) * P + r]);
    const unsigned rows = ptx::redux_add((a > 0 ? 1u : 0u) + (b > 0 ? 1u : 0u)), slots = ptx::redux_add(a + b);
    if (lane == 0) tiles[static_cast<std::int64_t>(r) * P * shape.plan_tiles] = static_cast<int>(rows);
    if (lane == 0) tiles[static_cast<std::int64_t>(P + r) * P * shape.plan_tiles] = static_cast<int>(slots);
  }
}

}  // namespace

void launch_map_count(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream) {
  const auto smem = static_cast<std::size_t>(kPlanTile * q.shape.P) * 4;
  launch_ranks(exchange_map_count, q.shape.P * q.shape.plan_tiles, kPlanThreads, smem, false, stream, q, map);
}

}  // namespace waybill::cuda
