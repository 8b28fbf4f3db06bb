// SPDX-License-Identifier: Apache-2.0
// A tile of 64 tokens of the dense map of all ranks: how many experts of each rank its tokens have.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/map_windows.h"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {

struct MapTile {
  int source, first, num_tokens;  // tokens [first, first + num_tokens) of rank `source`
  std::int64_t row;               // of the map: that of token `first`
};

__device__ __forceinline__ MapTile map_tile(const ExchangeParams& q, const MapWindows& map, int rank) {
  MapTile tile{};
  tile.source = static_cast<int>(blockIdx.x) / q.shape.plan_tiles, tile.first = static_cast<int>(blockIdx.x) % q.shape.plan_tiles * kPlanTile;
  const int T = min(max(q.window<int>(rank, map.totals)[2 * tile.source], 0), q.shape.T_max);
  tile.num_tokens = min(kPlanTile, max(0, T - tile.first));
  tile.row = static_cast<std::int64_t>(tile.source) * q.shape.T_max + tile.first;
  return tile;
}

// counts [64][P] ints in shared memory. Ends with a barrier.
__device__ __forceinline__ void count_map_tile(const ExchangeParams& q, const MapWindows& map, int rank, const MapTile& tile, int* counts) {
  const ExchangeShape& shape = q.shape;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  for (int i = static_cast<int>(threadIdx.x); i < kPlanTile * shape.P; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
  for (int i = warp; i < tile.num_tokens; i += kPlanWarps) {
    const auto* cells = q.window<std::uint8_t>(rank, map.cells) + (tile.row + i) * shape.E;
    for (int e = lane; e < shape.E; e += 32) {
      if (cells[e] != 0) atomicAdd(&counts[i * shape.P + rank_of_id(shape, e)], 1);
    }
  }
  __syncthreads();
}

}  // namespace waybill::cuda
