// SPDX-License-Identifier: Apache-2.0
// Expert order to rows with the copy engine of the SMs (sm_90): what unpermute_reduce does for rows of up to 64 slots. A warp's loads run ahead
// over the ends of rows, so that rows of one slot and of eight keep the memory equally busy.
//
// Grid (ctas, ranks), 512 threads. a: y [S_padded, H], c: z [R, H]; args.await_pulled as there. Bytes: S rows read, R written.
#include "exchange/cuda/slot_parts.cuh"

namespace waybill::cuda {
namespace {

struct NothingToFinish {
  __device__ __forceinline__ void operator()(const RowItems&, int) const {}
};

template <class Y, class Z, bool kWeighted>
__device__ __forceinline__ void reduce_rows(const ExchangeParams& q, const RowsArgs& args, const RankCall& call, const Ring& ring) {
  const RowsInOrder order{header_of(call)->R};
  const RowItems items(order.R, (ring.row_bytes + kRingPiece - 1) / kRingPiece, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), 12);
  SlotParts<RowsInOrder> parts(q.shape, call, order, items, call.a, args.slot_stride * static_cast<std::int64_t>(sizeof(Y)));
  const NothingToFinish finish;
  SlotSums<RowsInOrder, kWeighted, NothingToFinish> sums(q.shape, call, order, items, call.c, args.row_stride, finish);
  sum_items<Y, Z, kWeighted>(items, ring, parts, sums);
}

template <class Y, class Z>
__global__ void __launch_bounds__(kRingWarps * 32, 1)
    exchange_unpermute_bulk(const __grid_constant__ ExchangeParams q, const __grid_constant__ RowsArgs args, const int stages) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingBarriers full;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  const Ring ring = make_ring(smem, full, stages, args.H * static_cast<int>(sizeof(Y)));
  begin_exchange_kernel();
  if (args.await_pulled != 0 && !await_posted(q, rank, kSignalPulled)) return mark_lost(q, rank, call);
  ptx::fence_async_proxy_all();  // y was written by ordinary stores
  if (args.weighted != 0) {
    reduce_rows<Y, Z, true>(q, args, call, ring);
  } else {
    reduce_rows<Y, Z, false>(q, args, call, ring);
  }
#endif
}

}  // namespace

std::size_t unpermute_bulk_smem(int stages) { return ring_smem(kRingWarps, stages); }

void launch_unpermute_bulk(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType z, int ctas, int stages, bool overlap, cudaStream_t stream) {
  with_row_type(y, [&](auto* from) {
    with_row_type(z, [&](auto* to) {
      launch_ranks(exchange_unpermute_bulk<std::remove_pointer_t<decltype(from)>, std::remove_pointer_t<decltype(to)>>, ctas, kRingWarps * 32,
                   unpermute_bulk_smem(stages), overlap, stream, q, args, stages);
    });
  });
}

}  // namespace waybill::cuda
