// SPDX-License-Identifier: Apache-2.0
// Layout, first step: slots of each (expert, tile of rows).
//
// Waits for the metadata of all ranks (kSignalMeta). Grid (tiles the row budget can hold, ranks), 512 threads; tiles behind the last row end at once. Reads row
// metadata and local ids of the own window; writes expert_tiles [L][tiles]. Bytes: 8 R + (2 or 4) S read, 4 L * tiles written.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/layout_tile.cuh"

namespace waybill::cuda {
namespace {

template <int kWords>
__global__ void __launch_bounds__(kLayoutThreads) exchange_layout_count(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) std::uint32_t bits[];  // [L][kWords]
  __shared__ int starts[kLayoutTile + 1];
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;
  if (!await_posted(q, rank, kSignalMeta)) return mark_lost(q, rank, call);
  const HandleHeader header = *header_of(call);
  if (static_cast<int>(blockIdx.x) * q.shape.layout_rows >= header.R) return;
  const LayoutTile tile = load_tile(q, rank, header, starts);
  const bool twice = mark_tile<kWords>(q, rank, tile, starts, bits);
  if (twice && threadIdx.x == 0) atomicOr(&call.status->flags, static_cast<std::uint32_t>(kStatusDuplicateId));
  int* counts = q.window<int>(rank, q.shape.expert_tiles) + blockIdx.x;
  for (int e = static_cast<int>(threadIdx.x); e < q.shape.L; e += kLayoutThreads) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) count += __popc(bits[e * kWords + w]);
    counts[static_cast<std::int64_t>(e) * q.shape.layout_tiles] = count;
  }
}

}  // namespace

void launch_layout_count(const ExchangeParams& q, bool overlap, cudaStream_t stream) {
  const int tiles = (q.shape.row_budget + q.shape.layout_rows - 1) / q.shape.layout_rows;
  launch_ranks(q.shape.layout_rows == kLayoutTile ? exchange_layout_count<kLayoutTile / 32> : exchange_layout_count<1>, tiles > 0 ? tiles : 1, kLayoutThreads,
               layout_smem(q.shape), overlap, stream, q);
}

}  // namespace waybill::cuda
