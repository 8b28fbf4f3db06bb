// SPDX-License-Identifier: Apache-2.0
// A tile of routes: which ranks its tokens go to. Shared by the two kernels of the plan, so that they count alike. A warp has four tokens,
// a lane their routes k = lane, lane + 32, ...: read once, at the start, and kept in registers.
//
// Worked example, E = 4, P = 2, token ids {2, 0, 3, -1}: ranks {1, 0, 1, -}; counts {rank 0: 1, rank 1: 2}; before = {0, 0, 1, -}.
#pragma once

#include "exchange/cuda/exchange_signal.cuh"

namespace waybill::cuda {

inline constexpr int kPlanThreads = 512;
inline constexpr int kPlanWarps = kPlanThreads / 32;
inline constexpr int kTokensPerWarp = kPlanTile / kPlanWarps;

// As is_route() and is_bad_id() of waybill/route.h, which is a host header.
__device__ __forceinline__ bool is_valid_id(int id, int E) { return id >= 0 && id < E; }
__device__ __forceinline__ bool is_wrong_id(int id, int E) { return id < -1 || id >= E; }

__device__ __forceinline__ int rank_of_id(const ExchangeShape& shape, int id) {
  return shape.rank_table != nullptr ? __ldg(shape.rank_table + id) : id / shape.L;
}
__device__ __forceinline__ int local_of_id(const ExchangeShape& shape, int id, int rank) {
  return shape.local_table != nullptr ? __ldg(shape.local_table + id) : id - rank * shape.L;
}

// kChunks: 32 routes each; K <= 32 * kChunks.
template <int kChunks>
struct TileRoutes {
  int id[kTokensPerWarp][kChunks];      // -1 where there is none
  int rank[kTokensPerWarp][kChunks];    // -1 where there is no valid route
  int before[kTokensPerWarp][kChunks];  // slots of the token at that rank before k
};

// Token of the tile that index i of this warp stands for.
__device__ __forceinline__ int tile_token(int i) { return (static_cast<int>(threadIdx.x) >> 5) + i * kPlanWarps; }

// values [T, K] of the tile's tokens, `otherwise` where there are none.
template <int kChunks, class T, class Out>
__device__ __forceinline__ void load_tile_values(const T* __restrict__ values, int K, int first, int num_tokens, Out otherwise,
                                                 Out (&out)[kTokensPerWarp][kChunks]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < kTokensPerWarp; ++i) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int token = tile_token(i), k = c * 32 + lane;
      out[i][c] = token < num_tokens && k < K ? static_cast<Out>(values[static_cast<std::int64_t>(first + token) * K + k]) : otherwise;
    }
  }
}

// counts [64][P]: slots of each token at each rank; `routes` beside it. Returns the number of bad ids of this warp's tokens. Ends with a
// barrier.
template <int kChunks, class Id>
__device__ __forceinline__ int count_tile(const ExchangeShape& shape, const Id* __restrict__ ids, int first, int num_tokens, std::uint16_t* counts,
                                          TileRoutes<kChunks>& routes) {
  load_tile_values<kChunks>(ids, shape.K, first, num_tokens, -1, routes.id);
  for (int i = static_cast<int>(threadIdx.x); i < kPlanTile * shape.P; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
  int num_bad = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kTokensPerWarp; ++i) {
      const int id = routes.id[i][c];
      const bool is_valid = is_valid_id(id, shape.E);
      num_bad += __popc(__ballot_sync(ptx::kFullWarp, is_wrong_id(id, shape.E)));
      const int rank = is_valid ? rank_of_id(shape, id) : -1;
      const unsigned same = __match_any_sync(ptx::kFullWarp, rank), below = same & ptx::lanemask_lt();
      std::uint16_t* count = counts + tile_token(i) * shape.P + rank;
      const int earlier = is_valid && c > 0 ? *count : 0;
      __syncwarp();
      if (is_valid && below == 0) *count = static_cast<std::uint16_t>(earlier + __popc(same));
      if (kChunks > 1) __syncwarp();
      routes.rank[i][c] = rank, routes.before[i][c] = earlier + __popc(below);
    }
  }
  __syncthreads();
  return num_bad;
}

// Calls body(constant with the value of kChunks) for K.
template <class Body>
void with_chunks(int K, const Body& body) {
  if (K <= 32) return body(std::integral_constant<int, 1>());
  if (K <= 64) return body(std::integral_constant<int, 2>());
  body(std::integral_constant<int, 4>());
}

}  // namespace waybill::cuda
