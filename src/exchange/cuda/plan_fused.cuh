// SPDX-License-Identifier: Apache-2.0
// The whole plan in one launch: plan_count and plan_fill, with the routes read once and no launch between.
//
// Grid (tiles of 64 tokens, ranks), 512 threads. a: ids [T, K], b: weights [T, K] f32. The CTAs wait for the last one of their rank, which talks to the
// peers: all CTAs of the launch must be resident together (plan_fused_ctas says how many are). That wait has no timeout of its own: the last CTA's has.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_counts.cuh"
#include "exchange/cuda/plan_entries.cuh"

namespace waybill::cuda {
namespace {

// Until the rank's last CTA has the offsets.
__device__ __forceinline__ void await_plan(const ExchangeParams& q, int rank, std::uint32_t epoch) {
  if (threadIdx.x == 0) {
    while (static_cast<std::int32_t>(ptx::ld_acquire_sys(&q.control(rank)->flag[kSignalPlanned][rank]) - epoch) < 0) {
    }
  }
  __syncthreads();
}

template <class Id, class LocalId, int kChunks>
__global__ void __launch_bounds__(kPlanThreads, 1) exchange_plan_fused(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ CountsStorage s;
  __shared__ TileBases base;
  __shared__ int num_bad;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], tile = static_cast<int>(blockIdx.x);
  const int first = tile * kPlanTile, num_tokens = min(kPlanTile, max(0, call.T - first));
  auto* counts = reinterpret_cast<std::uint16_t*>(smem + FillLayout(q.shape.P, q.shape.K, sizeof(LocalId)).counts);
  if (threadIdx.x == 0) num_bad = 0;
  begin_exchange_kernel();
  const std::uint32_t planned = open_epoch(q, rank, kSignalPlanned);  // moved only when all CTAs have come this far
  TileRoutes<kChunks> routes;
  float weights[kTokensPerWarp][kChunks];
  load_tile_values<kChunks>(static_cast<const float*>(call.b), q.shape.K, first, q.shape.send_weights != 0 ? num_tokens : 0, 0.0f, weights);
  const int bad = count_tile(q.shape, static_cast<const Id*>(call.a), first, num_tokens, counts, routes);
  write_tile_counts(q, rank, call, counts, bad, num_bad);
  if (last_cta(q, rank, kTicketPlanCount)) {
    exchange_counts(q, rank, call, static_cast<int>(gridDim.x), s);
    __syncthreads();
    if (threadIdx.x == 0) ptx::st_release_sys(&q.control(rank)->flag[kSignalPlanned][rank], planned);
    close_epoch(q, rank, kSignalPlanned, planned);
  } else {
    await_plan(q, rank, planned);
  }
  if (__ldcg(&header_of(call)->valid) == 0) return;
  fill_tile<LocalId>(q, rank, call, tile, routes, weights, smem, base);
}

template <class Id, class Body>
void with_fused_kernel(const ExchangeShape& shape, const Body& body) {
  with_chunks(shape.K, [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    body(shape.local_id_bytes == 2 ? exchange_plan_fused<Id, std::int16_t, kChunks> : exchange_plan_fused<Id, std::int32_t, kChunks>);
  });
}

inline std::size_t fused_smem(const ExchangeShape& shape) { return FillLayout(shape.P, shape.K, shape.local_id_bytes).bytes; }

template <class Id>
int fused_ctas(const ExchangeShape& shape, int num_sms) {
  int blocks = 0;
  with_fused_kernel<Id>(shape, [&](auto kernel) {
    if (fused_smem(shape) > kPlainSharedBytes) {
      (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(fused_smem(shape)));
    }
    (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kPlanThreads, fused_smem(shape));
  });
  return blocks * num_sms;
}

template <class Id>
void launch_fused(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  with_fused_kernel<Id>(q.shape, [&](auto kernel) { launch_ranks(kernel, num_tiles, kPlanThreads, fused_smem(q.shape), overlap, stream, q); });
}

}  // namespace
}  // namespace waybill::cuda
