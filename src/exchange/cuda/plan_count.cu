// SPDX-License-Identifier: Apache-2.0
// Plan, first half: rows and slots of every (tile, rank), the totals of all ranks, and what follows from them.
//
// Grid (tiles of 64 tokens, ranks), 512 threads, a warp a token at a time. a: ids [T, K] int16 or int32.
// The last CTA scans the tiles, pushes [2P] totals to every peer and waits for theirs. All ranks then hold the same matrix: each computes
// its own offsets and the verdict of the budgets, alike on every rank.
// Bytes: T * K ids read, 8 P T / 64 of tile counts written and read twice, 8 P^2 over the links.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_counts.cuh"

namespace waybill::cuda {
namespace {

template <class Id, int kChunks>
__global__ void __launch_bounds__(kPlanThreads) exchange_plan_count(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) std::uint16_t counts[];  // [64][P]
  __shared__ CountsStorage s;
  __shared__ int num_bad;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  const int first = static_cast<int>(blockIdx.x) * kPlanTile, num_tokens = min(kPlanTile, max(0, call.T - first));
  if (threadIdx.x == 0) num_bad = 0;
  begin_exchange_kernel();
  TileRoutes<kChunks> routes;
  const int bad = count_tile(q.shape, static_cast<const Id*>(call.a), first, num_tokens, counts, routes);
  write_tile_counts(q, rank, call, counts, bad, num_bad);
  if (last_cta(q, rank, kTicketPlanCount)) exchange_counts(q, rank, call, static_cast<int>(gridDim.x), s);
}

}  // namespace

void launch_plan_count(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  const std::size_t smem = static_cast<std::size_t>(kPlanTile * q.shape.P) * 2;
  with_chunks(q.shape.K, [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    launch_ranks(q.shape.id_bytes == 2 ? exchange_plan_count<std::int16_t, kChunks> : exchange_plan_count<std::int32_t, kChunks>, num_tiles, kPlanThreads, smem,
                 overlap, stream, q);
  });
}

}  // namespace waybill::cuda
