// SPDX-License-Identifier: Apache-2.0
// Combine: every token's partials are read from the ranks that made them and added in rank order in fp32.
//
// Grid (ctas, ranks), 384 threads (168 registers each), a warp a token in pieces of 2 KB of the wire row. Each rank's partials [R, H] lie in its window;
// CTA 0 says so and all CTAs wait for all ranks, so the launch must be resident. c: out [T, H]; d: rows of the wire's type that are added at last, or null. The
// sum starts with the first part (exact where there is only one); a token without destinations gets 0, and so does every token of an invalid handle.
// from_slots: the partials were pushed to this rank (combine_push) and are read from its own window, without a wait. Bytes: a row read for each (token, rank),
// T rows written. Ends with kSignalPulled, which is not waited for here.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 4;
constexpr int kPiece = kVectors * 32 * 16;

// The partials of one token: where each of up to 32 destinations' rows lies (held by the lanes).
struct Sources {
  const unsigned char* row;  // of the lane's destination
  int num;
};

template <class Wire>
__device__ __forceinline__ void load_piece(const Sources& sources, int d, int at, int row_bytes, uint4 (&v)[kVectors]) {
  const auto address = __shfl_sync(ptx::kFullWarp, reinterpret_cast<unsigned long long>(sources.row), d);
  const auto* row = reinterpret_cast<const unsigned char*>(address);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (at + i * 512 < row_bytes) v[i] = load_row(row + at + i * 512);
  }
}

template <class Wire, int kValues>
__device__ __forceinline__ void add_piece(const uint4 (&v)[kVectors], bool is_first, float (&sum)[kVectors][kValues]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float x[kValues];
    Vector<Wire>::to_float(v[i], x);
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum[i][j] = is_first ? x[j] : sum[i][j] + x[j];
  }
}

// The first half of a RowEntry.
struct alignas(8) RowPlace {
  int rank, row;
};

__device__ __forceinline__ RowPlace entry_of_lane(const ExchangeShape& shape, const RankCall& call, int t, int d0) {
  const int d = d0 + (static_cast<int>(threadIdx.x) & 31);
  if (t >= call.T || d >= shape.D) return RowPlace{-1, 0};
  return *reinterpret_cast<const RowPlace*>(handle_part<RowEntry>(call, shape.h_entries) + static_cast<std::int64_t>(t) * shape.D + d);
}

// One piece of a token's sum. first: the entries of the first 32 destinations.
template <class Wire, class Out>
__device__ __forceinline__ void sum_piece(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, int rank, const RowPlace& first, int t,
                                          int offset, bool is_valid) {
  constexpr int kValues = Vector<Wire>::kValues;
  const ExchangeShape& shape = q.shape;
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * static_cast<int>(sizeof(Wire)), at = offset + lane * 16;
  float sum[kVectors][kValues] = {};
  bool is_first = true;
  for (int d0 = 0; d0 < shape.D; d0 += 32) {
    const RowPlace entry = d0 == 0 ? first : entry_of_lane(shape, call, t, d0);
    Sources sources{nullptr, __popc(__ballot_sync(ptx::kFullWarp, entry.rank >= 0))};
    if (entry.rank >= 0) {
      sources.row = args.from_slots != 0 ? q.window<unsigned char>(rank, args.slots) + (static_cast<std::int64_t>(t) * shape.D + d0 + lane) * row_bytes
                                         : q.window<unsigned char>(entry.rank, args.window) + static_cast<std::int64_t>(entry.row) * row_bytes;
    }
    if (sources.num == 0) break;
    uint4 even[kVectors] = {}, odd[kVectors] = {};
    load_piece<Wire>(sources, 0, at, row_bytes, even);
    for (int d = 0; d < sources.num; d += 2) {
      if (d + 1 < sources.num) load_piece<Wire>(sources, d + 1, at, row_bytes, odd);
      add_piece<Wire>(even, is_first, sum);
      is_first = false;
      if (d + 2 < sources.num) load_piece<Wire>(sources, d + 2, at, row_bytes, even);
      if (d + 1 < sources.num) add_piece<Wire>(odd, false, sum);
    }
    if (sources.num < 32) break;
  }
  Out* out = static_cast<Out*>(call.c) + t * args.out_stride;
  const Wire* more = call.d == nullptr || !is_valid ? nullptr : static_cast<const Wire*>(call.d) + t * static_cast<std::int64_t>(args.H);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int byte = at + i * 512;
    if (byte >= row_bytes) continue;
    const int column = byte / static_cast<int>(sizeof(Wire));
    if (more != nullptr) {
      float own[kValues];
      Vector<Wire>::to_float(load_row(more + column), own);
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[i][j] += own[j];
    }
    store_values<Out>(out + column, sum[i]);
  }
}

// A warp takes a token, or a part of its pieces where tokens are few; the entries of its next token are on their way meanwhile.
template <class Wire, class Out>
__device__ __forceinline__ void sum_tokens(const ExchangeParams& q, const CombineArgs& args, const RankCall& call, int rank, bool is_valid) {
  const int row_bytes = args.H * static_cast<int>(sizeof(Wire));
  const RowItems items(call.T, (row_bytes + kPiece - 1) / kPiece);
  RowPlace next = entry_of_lane(q.shape, call, items.row(items.first), 0);
  for (int item = items.first; item < items.count; item += items.step) {
    const RowPlace entry = is_valid ? next : RowPlace{-1, 0};
    next = entry_of_lane(q.shape, call, items.row(item + items.step), 0);
    for (int piece = items.begin(item); piece < items.end(item); ++piece)
      sum_piece<Wire, Out>(q, args, call, rank, entry, items.row(item), piece * kPiece, is_valid);
  }
}

template <class Wire, class Out>
__global__ void __launch_bounds__(kPullThreads) exchange_combine_pull(const __grid_constant__ ExchangeParams q, const CombineArgs args) {
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  begin_exchange_kernel();
  bool is_valid = header_of(call)->valid != 0;
  const bool waits = is_valid && args.from_slots == 0;
  const std::uint32_t partials = open_epoch(q, rank, kSignalPartials);
  if (waits) {
    if (blockIdx.x == 0) post_signal(q, rank, kSignalPartials, partials);
    is_valid = await_signal(q, rank, kSignalPartials, partials);
    if (!is_valid) mark_lost(q, rank, call);
  }
  sum_tokens<Wire, Out>(q, args, call, rank, is_valid);
  if (!waits || !last_cta(q, rank, kTicketCombine)) return;
  close_epoch(q, rank, kSignalPartials, partials);
  post_only(q, rank, kSignalPulled);
}

template <class Body>
auto with_types(RowType wire, RowType out, const Body& body) {
  return with_row_type(wire, [&](auto* w) { return with_row_type(out, [&](auto* o) { return body(w, o); }); });
}

}  // namespace

const void* combine_pull_kernel(RowType wire, RowType out) {
  return with_types(wire, out, [](auto* w, auto* o) {
    return reinterpret_cast<const void*>(&exchange_combine_pull<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>>);
  });
}

void launch_combine_pull(const ExchangeParams& q, const CombineArgs& args, RowType wire, RowType out, int ctas, bool overlap, cudaStream_t stream) {
  with_types(wire, out, [&](auto* w, auto* o) {
    launch_ranks(exchange_combine_pull<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>>, ctas, kPullThreads, 0, overlap, stream, q,
                 args);
  });
}

}  // namespace waybill::cuda
