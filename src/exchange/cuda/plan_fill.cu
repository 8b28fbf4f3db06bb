// SPDX-License-Identifier: Apache-2.0
// Plan, second half: the tokens' entries, and ids, weights and row metadata pushed to their final place at the destinations.
//
// Grid (tiles of 64 tokens, ranks), 512 threads. a: ids [T, K], b: weights [T, K] f32. The slots of a tile that go to one rank are
// neighbours there: they are put together in shared memory and written as one run. Nothing is done on an invalid handle.
// Bytes over the links: 8 a row, 4 + local id a slot. Posts kSignalMeta,
// which layout_count waits for: dispatch need not.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_entries.cuh"

namespace waybill::cuda {
namespace {

template <class Id, class LocalId, int kChunks>
__global__ void __launch_bounds__(kPlanThreads) exchange_plan_fill(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ TileBases base;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], tile = static_cast<int>(blockIdx.x);
  const int first = tile * kPlanTile, num_tokens = min(kPlanTile, max(0, call.T - first));
  auto* counts = reinterpret_cast<std::uint16_t*>(smem + FillLayout(q.shape.P, q.shape.K, sizeof(LocalId)).counts);
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;  // the same for every CTA and every rank of the group
  TileRoutes<kChunks> routes;
  float weights[kTokensPerWarp][kChunks];
  load_tile_values<kChunks>(static_cast<const float*>(call.b), q.shape.K, first, num_tokens, 0.0f, weights);
  (void)count_tile(q.shape, static_cast<const Id*>(call.a), first, num_tokens, counts, routes);
  fill_tile<LocalId>(q, rank, call, tile, routes, weights, smem, base);
}

template <class Id, int kChunks>
auto pick(int local_id_bytes) {
  return local_id_bytes == 2 ? exchange_plan_fill<Id, std::int16_t, kChunks> : exchange_plan_fill<Id, std::int32_t, kChunks>;
}

}  // namespace

void launch_plan_fill(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  const FillLayout layout(q.shape.P, q.shape.K, q.shape.local_id_bytes);
  with_chunks(q.shape.K, [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    const auto kernel = q.shape.id_bytes == 2 ? pick<std::int16_t, kChunks>(q.shape.local_id_bytes) : pick<std::int32_t, kChunks>(q.shape.local_id_bytes);
    launch_ranks(kernel, num_tiles, kPlanThreads, layout.bytes, overlap, stream, q);
  });
}

}  // namespace waybill::cuda
