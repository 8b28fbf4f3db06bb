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

// Where the loads of a warp stand. All values but `row` are the same in every lane.
struct Cursor {
  std::int64_t item;  // next item
  std::int64_t items, step;
  const unsigned char* row;  // lane d: partial d of the item being issued, at its piece
  RowEntry next;             // lane d: entry d of the next item
  std::int32_t bytes;        // of the piece
  int num, d;                // partials of the item being issued, and how many of them are on their way
  int stage;
};

// Entries are read one item ahead of their use.
__device__ __forceinline__ void fetch_entries(const RankCall& call, const ExchangeShape& shape, int pieces, Cursor& c) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  c.next = RowEntry{-1, 0, 0, 0};
  if (c.item < c.items && lane < shape.D) c.next = handle_part<RowEntry>(call, shape.h_entries)[c.item / pieces * shape.D + lane];
}

__device__ __forceinline__ void open_item(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, int pieces, int row_bytes, Cursor& c) {
  const int offset = static_cast<int>(c.item % pieces) * kPiece;
  c.num = __popc(__ballot_sync(ptx::kFullWarp, c.next.rank >= 0));
  c.bytes = min(kPiece, row_bytes - offset);
  c.d = 0;
  if (c.next.rank >= 0) c.row = q.window<unsigned char>(c.next.rank, args.window) + static_cast<std::int64_t>(c.next.row) * row_bytes + offset;
  c.item += c.step;
  fetch_entries(call, q.shape, pieces, c);
}

// One more load, when there is one.
__device__ __forceinline__ bool issue(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, int pieces, int row_bytes, int stages,
                                      unsigned char* ring, std::uint64_t* full, Cursor& c) {
  while (c.d == c.num) {
    if (c.item >= c.items) return false;
    open_item(q, args, call, pieces, row_bytes, c);
  }
  if ((static_cast<int>(threadIdx.x) & 31) == c.d) {
    ptx::mbarrier_arrive_expect(full + c.stage, static_cast<std::uint32_t>(c.bytes));
    ptx::bulk_load(ring + c.stage * kPiece, c.row, static_cast<std::uint32_t>(c.bytes), full + c.stage);
  }
  ++c.d;
  if (++c.stage == stages) c.stage = 0;
  return true;
}

template <class Wire, class Out>
__device__ __forceinline__ void sum_items(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, int stages, unsigned char* ring,
                                          std::uint64_t* full) {
  constexpr int kValues = Vector<Wire>::kValues;
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * static_cast<int>(sizeof(Wire)), pieces = (row_bytes + kPiece - 1) / kPiece;
  const std::int64_t items = static_cast<std::int64_t>(call.T) * pieces, step = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x;
  Cursor cursor{first, items, step, nullptr, {-1, 0, 0, 0}, 0, 0, 0, 0};
  fetch_entries(call, q.shape, pieces, cursor);
  for (int s = 0; s < stages; ++s) {
    if (!issue(q, args, call, pieces, row_bytes, stages, ring, full, cursor)) break;
  }
  int stage = 0;
  std::uint32_t parity = 0;
  RowEntry ahead{-1, 0, 0, 0};  // of the item to be summed: only their number is used
  if (first < items && lane < q.shape.D) ahead = handle_part<RowEntry>(call, q.shape.h_entries)[first / pieces * q.shape.D + lane];
  for (std::int64_t item = first; item < items; item += step) {
    const int num = __popc(__ballot_sync(ptx::kFullWarp, ahead.rank >= 0));
    ahead = RowEntry{-1, 0, 0, 0};
    if (item + step < items && lane < q.shape.D) ahead = handle_part<RowEntry>(call, q.shape.h_entries)[(item + step) / pieces * q.shape.D + lane];
    const int offset = static_cast<int>(item % pieces) * kPiece + lane * 16;
    float sum[kVectors][kValues] = {};
    for (int d = 0; d < num; ++d) {
      ptx::mbarrier_wait(full + stage, parity);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (offset + i * 512 >= row_bytes) continue;
        float x[kValues];
        Vector<Wire>::to_float(*reinterpret_cast<const uint4*>(ring + stage * kPiece + lane * 16 + i * 512), x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) sum[i][j] = d == 0 ? x[j] : sum[i][j] + x[j];
      }
      __syncwarp();  // all lanes have read the stage
      (void)issue(q, args, call, pieces, row_bytes, stages, ring, full, cursor);
      if (++stage == stages) stage = 0, parity ^= 1u;
    }
    Out* out = static_cast<Out*>(call.c) + item / pieces * args.out_stride;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (offset + i * 512 < row_bytes) store_values<Out>(out + (offset + i * 512) / static_cast<int>(sizeof(Wire)), sum[i]);
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
    sum_items<Wire, Out>(q, args, call, stages, smem + static_cast<std::size_t>(warp) * static_cast<std::size_t>(stages) * kPiece, full[warp]);
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
