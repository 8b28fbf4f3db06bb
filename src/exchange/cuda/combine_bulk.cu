// SPDX-License-Identifier: Apache-2.0
// Combine by pull with the copy engine of the SMs (sm_90): what combine_pull does, with far more bytes in flight.
//
// Grid (ctas, ranks), `warps` warps a CTA, each on its own: an item is a piece (2 KB of the wire row) of a token; the piece of each of its
// partials is one bulk load into a ring of `stages` buffers, issued as far ahead as the ring reaches, over item boundaries. The sums are
// those of combine_pull: rank order, fp32, starting with the first part. c: out [T, H]. All CTAs wait for the partials of all ranks.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 4;
constexpr int kPiece = kVectors * 32 * 16;
constexpr int kMaxWarps = 16;
constexpr int kMaxStages = 16;

// Where the loads of a warp stand. All values but `row` and `next` are the same in every lane.
struct Cursor {
  int item, piece, end;      // next item; piece and last piece of the item being issued
  const unsigned char* row;  // lane d: partial d of that item
  RowEntry next;             // lane d: entry d of the next item
  int num, d;                // partials of that item, and how many pieces of this `piece` are on their way
  int stage;
};

__device__ __forceinline__ RowEntry entry_of_lane(const ExchangeShape& shape, const RankCall& call, int t) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return t < call.T && lane < shape.D ? handle_part<RowEntry>(call, shape.h_entries)[static_cast<std::int64_t>(t) * shape.D + lane] : RowEntry{-1, 0, 0, 0};
}

// The ring of one warp.
struct Ring {
  unsigned char* stages;
  std::uint64_t* full;
  int num, row_bytes;
};

// One more load, when there is one. Entries are read one item ahead of their use.
__device__ __forceinline__ void issue(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, const RowItems& items, const Ring& ring,
                                      Cursor& c) {
  if (c.d == c.num && c.num > 0 && c.piece + 1 < c.end) ++c.piece, c.d = 0;
  while (c.d == c.num) {  // the next item that has partials
    if (c.item >= items.count) return;
    c.num = __popc(__ballot_sync(ptx::kFullWarp, c.next.rank >= 0));
    c.piece = items.begin(c.item), c.end = items.end(c.item), c.d = 0;
    if (c.piece >= c.end) c.num = 0;
    if (c.next.rank >= 0) c.row = q.window<unsigned char>(c.next.rank, args.window) + static_cast<std::int64_t>(c.next.row) * ring.row_bytes;
    c.item += items.step;
    c.next = entry_of_lane(q.shape, call, items.row(c.item));
  }
  if ((static_cast<int>(threadIdx.x) & 31) == c.d) {
    const int offset = c.piece * kPiece;
    const auto bytes = static_cast<std::uint32_t>(min(kPiece, ring.row_bytes - offset));
    ptx::mbarrier_arrive_expect(ring.full + c.stage, bytes);
    ptx::bulk_load(ring.stages + c.stage * kPiece, c.row + offset, bytes, ring.full + c.stage);
  }
  ++c.d;
  if (++c.stage == ring.num) c.stage = 0;
}

template <class Wire, class Out>
__device__ __forceinline__ void sum_items(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, const Ring& ring) {
  constexpr int kValues = Vector<Wire>::kValues;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const RowItems items(call.T, (ring.row_bytes + kPiece - 1) / kPiece);
  Cursor cursor{items.first, 0, 0, nullptr, entry_of_lane(q.shape, call, items.row(items.first)), 0, 0, 0};
  for (int s = 0; s < ring.num; ++s) issue(q, args, call, items, ring, cursor);
  int stage = 0;
  std::uint32_t parity = 0;
  RowEntry ahead = entry_of_lane(q.shape, call, items.row(items.first));  // of the item to be summed: only their number is used
  for (int item = items.first; item < items.count; item += items.step) {
    const int num = __popc(__ballot_sync(ptx::kFullWarp, ahead.rank >= 0));
    ahead = entry_of_lane(q.shape, call, items.row(item + items.step));
    Out* out = static_cast<Out*>(call.c) + items.row(item) * args.out_stride;
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      const int offset = piece * kPiece + lane * 16;
      float sum[kVectors][kValues] = {};
      for (int d = 0; d < num; ++d) {
        ptx::mbarrier_wait(ring.full + stage, parity);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (offset + i * 512 >= ring.row_bytes) continue;
          float x[kValues];
          Vector<Wire>::to_float(*reinterpret_cast<const uint4*>(ring.stages + stage * kPiece + lane * 16 + i * 512), x);
#pragma unroll
          for (int j = 0; j < kValues; ++j) sum[i][j] = d == 0 ? x[j] : sum[i][j] + x[j];
        }
        __syncwarp();  // all lanes have read the stage
        issue(q, args, call, items, ring, cursor);
        if (++stage == ring.num) stage = 0, parity ^= 1u;
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (offset + i * 512 < ring.row_bytes) store_values<Out>(out + (offset + i * 512) / static_cast<int>(sizeof(Wire)), sum[i]);
      }
    }
  }
}

template <class Wire, class Out>
__device__ __forceinline__ void clear_out(const CombineArgs& args, const RankCall& call) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int t = static_cast<int>(threadIdx.x >> 5) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); t < call.T;
       t += static_cast<int>(gridDim.x * (blockDim.x / 32))) {
    const float zeros[8] = {};
    for (int h = lane * 8; h < args.H; h += 256) store_values<Out>(static_cast<Out*>(call.c) + t * args.out_stride + h, zeros);
  }
}

template <class Wire, class Out>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    exchange_combine_bulk(const __grid_constant__ ExchangeParams q, const __grid_constant__ CombineArgs args, const int stages) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];  // [warps][stages][kPiece]
  __shared__ std::uint64_t full[kMaxWarps][kMaxStages];
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], warp = static_cast<int>(threadIdx.x) >> 5;
  if ((threadIdx.x & 31) == 0) {
    for (int s = 0; s < stages; ++s) ptx::mbarrier_init(&full[warp][s], 1);
    ptx::mbarrier_init_fence();
    ptx::fence_async_proxy();
  }
  __syncwarp();
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return clear_out<Wire, Out>(args, call);
  const std::uint32_t partials = open_epoch(q, rank, kSignalPartials);
  if (blockIdx.x == 0) post_signal(q, rank, kSignalPartials, partials);
  if (await_signal(q, rank, kSignalPartials, partials)) {
    ptx::fence_async_proxy_all();  // the partials were written by ordinary stores, and are read by the copy engine
    const Ring ring{smem + static_cast<std::size_t>(warp) * static_cast<std::size_t>(stages) * kPiece, full[warp], stages,
                    args.H * static_cast<int>(sizeof(Wire))};
    sum_items<Wire, Out>(q, args, call, ring);
  } else {
    mark_lost(q, rank, call);
    clear_out<Wire, Out>(args, call);
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

std::size_t combine_bulk_smem(int warps, int stages) { return static_cast<std::size_t>(warps) * static_cast<std::size_t>(stages) * kPiece; }

void launch_combine_bulk(const ExchangeParams& q, const CombineArgs& args, RowType wire, RowType out, int ctas, int warps, int stages, bool overlap,
                         cudaStream_t stream) {
  with_types(wire, out, [&](auto* w, auto* o) {
    launch_ranks(exchange_combine_bulk<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>>, ctas, warps * 32,
                 combine_bulk_smem(warps, stages), overlap, stream, q, args, stages);
  });
}

}  // namespace waybill::cuda
