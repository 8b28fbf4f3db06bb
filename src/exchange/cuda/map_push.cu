// SPDX-License-Identifier: Apache-2.0
// Dense maps: this rank's rows of the map and of the weights, made from its routes or its caller's cells, to every rank.
//
// Grid (SMs, ranks), 256 threads, a warp a token. A row that names an expert twice has its weights summed in order of k. Barriers before (the peers have
// read the former map) and after are launches of their own. Bytes over the links: 5 T E to each peer.
#include "core/cuda/num_sms.h"
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Id>
__device__ __forceinline__ void add_routes(const RankCall& call, const ExchangeShape& shape, int t, std::uint8_t* cells, float* weights) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int k0 = 0; k0 < shape.K; k0 += 32) {
    const std::int64_t at = static_cast<std::int64_t>(t) * shape.K + k0 + lane;
    const int id = k0 + lane < shape.K ? static_cast<int>(static_cast<const Id*>(call.a)[at]) : -1;
    const bool valid = is_valid_id(id, shape.E);
    const unsigned same = __match_any_sync(ptx::kFullWarp, valid ? id : -1 - lane);
    const int turn = __popc(same & ptx::lanemask_lt());
    const int turns = static_cast<int>(__reduce_max_sync(ptx::kFullWarp, static_cast<unsigned>(turn))) + 1;
    for (int i = 0; i < turns; ++i) {
      if (valid && turn == i) cells[id] = 1, weights[id] += static_cast<const float*>(call.b)[at];
      __syncwarp();
    }
  }
}

__global__ void __launch_bounds__(kThreads) exchange_map_push(const __grid_constant__ ExchangeParams q, const MapWindows map) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], lane = static_cast<int>(threadIdx.x) & 31;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const int capacity = call.d != nullptr ? *static_cast<const int*>(call.d) : 0;
    for (int p = 0; p < shape.P; ++p) {
      int* totals = q.window<int>(p, map.totals) + 2 * rank;
      totals[0] = call.T, totals[1] = capacity;
    }
  }
  for (int t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32); t < call.T; t += static_cast<int>(gridDim.x) * kWarps) {
    const std::int64_t first = (static_cast<std::int64_t>(rank) * shape.T_max + t) * shape.E;
    auto* cells = q.window<std::uint8_t>(rank, map.cells) + first;
    auto* weights = q.window<float>(rank, map.weights) + first;
    for (int e = lane; e < shape.E; e += 32) {
      const float w = call.a == nullptr ? static_cast<const float*>(call.c)[static_cast<std::int64_t>(t) * shape.E + e] : 0.0f;
      cells[e] = w != 0.0f ? 1 : 0, weights[e] = w;
    }
    __syncwarp();
    if (call.a != nullptr) {
      if (shape.id_bytes == 2) {
        add_routes<std::int16_t>(call, shape, t, cells, weights);
      } else {
        add_routes<std::int32_t>(call, shape, t, cells, weights);
      }
    }
    __syncwarp();
    for (int p = 0; p < shape.P; ++p) {
      if (p == rank) continue;
      auto* to_cells = q.window<std::uint8_t>(p, map.cells) + first;
      auto* to_weights = q.window<float>(p, map.weights) + first;
      for (int e = lane; e < shape.E; e += 32) to_cells[e] = cells[e], to_weights[e] = weights[e];
    }
  }
}

}  // namespace

void launch_map_push(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream) {
  launch_ranks(exchange_map_push, num_sms(), kThreads, 0, false, stream, q, map);
}

}  // namespace waybill::cuda
