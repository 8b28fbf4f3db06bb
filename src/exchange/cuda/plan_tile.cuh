// SPDX-License-Identifier: Apache-2.0
// A tile of routes: which ranks its tokens go to. Shared by the two kernels of the plan, so that they count alike.
//
// Worked example, E = 4, P = 2, token ids {2, 0, 3, -1}: ranks {1, 0, 1, -}; counts {rank 0: 1, rank 1: 2}; within = {0, 0, 1, -}.
#pragma once

#include "exchange/cuda/exchange_signal.cuh"

namespace waybill::cuda {

inline constexpr int kPlanThreads = 512;
inline constexpr int kPlanWarps = kPlanThreads / 32;
inline constexpr int kTokensPerWarp = kPlanTile / kPlanWarps;

// As is_route() and is_bad_id() of waybill/route.h, which is a host header.
__device__ __forceinline__ bool is_valid_id(int id, int E) { return id >= 0 && id < E; }
__device__ __forceinline__ bool is_wrong_id(int id, int E) { return id < -1 || id >= E; }

template <class Id>
__device__ __forceinline__ int rank_of_id(const ExchangeShape& shape, int id) {
  return shape.rank_table != nullptr ? __ldg(shape.rank_table + id) : id / shape.L;
}
__device__ __forceinline__ int local_of_id(const ExchangeShape& shape, int id, int rank) {
  return shape.local_table != nullptr ? __ldg(shape.local_table + id) : id - rank * shape.L;
}

// counts [64][P]: slots of each token at each rank. visit(token of the tile, k, id, rank, slots of the token at that rank before k) for
// every valid route. Returns the number of bad ids of this warp's tokens. Ends with a barrier.
template <class Id, class Visit>
__device__ __forceinline__ int count_tile(const ExchangeShape& shape, const Id* __restrict__ ids, int first, int num_tokens, std::uint16_t* counts,
                                          const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  for (int i = static_cast<int>(threadIdx.x); i < kPlanTile * shape.P; i += kPlanThreads) counts[i] = 0;
  __syncthreads();
  int num_bad = 0;
  for (int k0 = 0; k0 < shape.K; k0 += 32) {
    int id[kTokensPerWarp];
#pragma unroll
    for (int i = 0; i < kTokensPerWarp; ++i) {
      const int token = warp + i * kPlanWarps;
      id[i] = -1;
      if (token < num_tokens && k0 + lane < shape.K) id[i] = ids[static_cast<std::int64_t>(first + token) * shape.K + k0 + lane];
    }
#pragma unroll
    for (int i = 0; i < kTokensPerWarp; ++i) {
      const int token = warp + i * kPlanWarps;
      const bool is_valid = is_valid_id(id[i], shape.E);
      num_bad += __popc(__ballot_sync(ptx::kFullWarp, is_wrong_id(id[i], shape.E)));
      const int rank = is_valid ? rank_of_id<Id>(shape, id[i]) : -1;
      const unsigned same = __match_any_sync(ptx::kFullWarp, rank);
      const unsigned before = same & ptx::lanemask_lt();
      std::uint16_t* count = counts + token * shape.P + rank;
      const int earlier = is_valid ? *count : 0;
      __syncwarp();
      if (is_valid && before == 0) *count = static_cast<std::uint16_t>(earlier + __popc(same));
      __syncwarp();
      if (is_valid) visit(token, k0 + lane, id[i], rank, earlier + __popc(before));
    }
  }
  __syncthreads();
  return num_bad;
}

}  // namespace waybill::cuda
