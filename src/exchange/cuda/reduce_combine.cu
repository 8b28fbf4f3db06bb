// SPDX-License-Identifier: Apache-2.0
// Expert rows to out in one launch (sm_90): the rows' partials are reduced chunk by chunk, and combined while the next chunks are reduced, so that
// the link is busy from the first chunk on. Bits: those of unpermute_reduce and combine.
//
// Grid (ctas, ranks), 512 threads; all CTAs resident. The first args.combine_ctas CTAs combine (sum_ring.cuh over combine_parts.cuh), the others
// reduce (over slot_parts.cuh) y [S_padded, H] (call.a) into the window of partials, in the order RowsByChunk. The warp that completes a chunk
// tells the rank that combines it; a combining warp waits for the chunk of each partial before it loads it. c: out [T, H], d: as combine.
// Bytes: S rows read, R written, a row read for each (token, rank), T rows written. Ends with kSignalPulled, as combine.
#include "exchange/cuda/combine_parts.cuh"
#include "exchange/cuda/slot_parts.cuh"

namespace waybill::cuda {
namespace {

// A part of a row is written: one of the chunk's rows * items.parts.
struct FinishPart {
  const ExchangeParams& q;
  const RowsByChunk& order;
  int rank;
  std::uint32_t epoch;
  __device__ __forceinline__ void operator()(const RowItems& items, int item) const {
    const int at = items.row(item);
    if (order(at) < 0) return;
    const int source = order.source(at), chunk = order.chunk(at);
    __syncwarp();
    finish_chunk_parts(q, rank, kChunkPartials, source, chunk, 1, order.rows_in(source, chunk) * items.parts, epoch);
  }
};

// offsets [P + 1] of the sources' rows.
template <class Y, class Wire, bool kWeighted>
__device__ __forceinline__ void reduce_chunks(const ExchangeParams& q, const ReduceCombineArgs& args, const RankCall& call, int rank, const Ring& ring,
                                              const int* offsets, std::uint32_t epoch) {
  const ExchangeShape& shape = q.shape;
  int most = 0;
  for (int p = 0; p < shape.P; ++p) most = max(most, offsets[p + 1] - offsets[p]);
  const int chunk = 1 << shape.chunk_shift;
  const RowsByChunk order{offsets, shape.P, rank, shape.chunk_shift, (most + chunk - 1) / chunk * chunk * shape.P};
  const int first = args.combine_ctas, ctas = static_cast<int>(gridDim.x) - first;
  const RowItems items(order.count, (ring.row_bytes + kRingPiece - 1) / kRingPiece, static_cast<int>(blockIdx.x) - first, ctas, 12);
  SlotParts<RowsByChunk> parts(shape, call, order, items, call.a, args.slot_stride * static_cast<std::int64_t>(sizeof(Y)));
  const FinishPart finish{q, order, rank, epoch};
  SlotSums<RowsByChunk, kWeighted, FinishPart> sums(shape, call, order, items, q.window<Wire>(rank, args.combine.window), args.combine.H, finish);
  sum_items<Y, Wire, kWeighted>(items, ring, parts, sums);
}

template <class Y, class Wire>
__device__ __forceinline__ void combine_chunks(const ExchangeParams& q, const ReduceCombineArgs& args, const RankCall& call, int rank, const Ring& ring,
                                               const int* base, std::uint32_t epoch) {
  const RowItems items(call.T, (ring.row_bytes + kRingPiece - 1) / kRingPiece, static_cast<int>(blockIdx.x), args.combine_ctas, 4);
  CombineParts<true> parts(q, call, rank, args.combine.window, ring.row_bytes, items, base, epoch);
  CombineSums sums(q.shape, call, args.combine, items);
  sum_items<Wire, Y, false>(items, ring, parts, sums);
}

// Y: type of the expert rows and of out.
template <class Y, class Wire>
__global__ void __launch_bounds__(kRingWarps * 32, 1)
    exchange_reduce_combine(const __grid_constant__ ExchangeParams q, const __grid_constant__ ReduceCombineArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingBarriers full;
  __shared__ int rows[kMaxDevicePeers + 1];
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  const bool combines = static_cast<int>(blockIdx.x) < args.combine_ctas;
  const int width = args.combine.H * static_cast<int>(combines ? sizeof(Wire) : sizeof(Y));
  const Ring ring = make_ring(smem, full, combines ? args.combine_stages : args.reduce_stages, width);
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) {
    if (combines) clear_out<Y>(args.combine, call, static_cast<int>(blockIdx.x), args.combine_ctas);
    return;
  }
  const std::uint32_t partials = open_epoch(q, rank, kSignalPartials);
  const int* own_rows = handle_part<int>(call, combines ? q.shape.h_base : q.shape.h_row_offsets);
  for (int p = static_cast<int>(threadIdx.x); p <= q.shape.P; p += static_cast<int>(blockDim.x)) rows[p] = own_rows[p];
  __syncthreads();
  if (combines) {
    combine_chunks<Y, Wire>(q, args, call, rank, ring, rows, partials);
  } else {
    if (!await_posted(q, rank, kSignalPulled)) return mark_lost(q, rank, call);
    ptx::fence_async_proxy_all();  // y was written by ordinary stores
    if (args.weighted != 0) {
      reduce_chunks<Y, Wire, true>(q, args, call, rank, ring, rows, partials);
    } else {
      reduce_chunks<Y, Wire, false>(q, args, call, rank, ring, rows, partials);
    }
  }
  if (!last_cta(q, rank, kTicketCombine)) return;
  close_epoch(q, rank, kSignalPartials, partials);
  post_only(q, rank, kSignalPulled);
#endif
}

template <class Body>
auto with_types(RowType y, RowType wire, const Body& body) {
  return with_row_type(y, [&](auto* a) { return with_row_type(wire, [&](auto* b) { return body(a, b); }); });
}

}  // namespace

const void* reduce_combine_kernel(RowType y, RowType wire) {
  return with_types(y, wire, [](auto* a, auto* b) {
    return reinterpret_cast<const void*>(&exchange_reduce_combine<std::remove_pointer_t<decltype(a)>, std::remove_pointer_t<decltype(b)>>);
  });
}

std::size_t reduce_combine_smem(const ReduceCombineArgs& args) {
  return ring_smem(kRingWarps, args.combine_stages > args.reduce_stages ? args.combine_stages : args.reduce_stages);
}

void launch_reduce_combine(const ExchangeParams& q, const ReduceCombineArgs& args, RowType y, RowType wire, int ctas, bool overlap, cudaStream_t stream) {
  with_types(y, wire, [&](auto* a, auto* b) {
    launch_ranks(exchange_reduce_combine<std::remove_pointer_t<decltype(a)>, std::remove_pointer_t<decltype(b)>>, ctas, kRingWarps * 32,
                 reduce_combine_smem(args), overlap, stream, q, args);
  });
}

}  // namespace waybill::cuda
