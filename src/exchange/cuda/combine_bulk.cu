// SPDX-License-Identifier: Apache-2.0
// Combine by pull with the copy engine of the SMs (sm_90): what combine_pull does, with far more bytes in flight.
//
// Grid (ctas, ranks), `warps` warps a CTA, each on its own: an item is a piece (2 KB of the wire row) of a token; the piece of each of its
// partials is one bulk load into a ring of `stages` buffers, issued as far ahead as the ring reaches, over item boundaries. The sums are
// those of combine_pull: rank order, fp32, starting with the first part. c: out [T, H], d: what is added to it, or null. All CTAs wait for the partials of all
// ranks.
#include "exchange/cuda/combine_parts.cuh"

namespace waybill::cuda {
namespace {

template <class Wire, class Out>
__global__ void __launch_bounds__(kRingWarps * 32, 1)
    exchange_combine_bulk(const __grid_constant__ ExchangeParams q, const __grid_constant__ CombineArgs args, const int stages) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingBarriers full;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  const Ring ring = make_ring(smem, full, stages, args.H * static_cast<int>(sizeof(Wire)));
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return clear_out<Out>(args, call, cta, ctas);
  const std::uint32_t partials = open_epoch(q, rank, kSignalPartials);
  if (blockIdx.x == 0) post_signal(q, rank, kSignalPartials, partials);
  if (await_signal(q, rank, kSignalPartials, partials)) {
    ptx::fence_async_proxy_all();  // the partials were written by ordinary stores, and are read by the copy engine
    const RowItems items(call.T, (ring.row_bytes + kRingPiece - 1) / kRingPiece);
    CombineParts<false> parts(q, call, rank, args.window, ring.row_bytes, items);
    CombineSums sums(q.shape, call, args, items);
    sum_items<Wire, Out, false>(items, ring, parts, sums);
  } else {
    mark_lost(q, rank, call);
    clear_out<Out>(args, call, cta, ctas);
  }
  if (!last_cta(q, rank, kTicketCombine)) return;
  close_epoch(q, rank, kSignalPartials, partials);
  post_only(q, rank, kSignalPulled);
#endif
}

template <class Body>
auto with_types(RowType wire, RowType out, const Body& body) {
  return with_row_type(wire, [&](auto* w) { return with_row_type(out, [&](auto* o) { return body(w, o); }); });
}

}  // namespace

const void* combine_bulk_kernel(RowType wire, RowType out) {
  return with_types(wire, out, [](auto* w, auto* o) {
    return reinterpret_cast<const void*>(&exchange_combine_bulk<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>>);
  });
}

std::size_t combine_bulk_smem(int warps, int stages) { return ring_smem(warps, stages); }

void launch_combine_bulk(const ExchangeParams& q, const CombineArgs& args, RowType wire, RowType out, int ctas, int warps, int stages, bool overlap,
                         cudaStream_t stream) {
  with_types(wire, out, [&](auto* w, auto* o) {
    launch_ranks(exchange_combine_bulk<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>>, ctas, warps * 32,
                 combine_bulk_smem(warps, stages), overlap, stream, q, args, stages);
  });
}

}  // namespace waybill::cuda
