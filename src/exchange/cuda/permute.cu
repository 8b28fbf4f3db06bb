// SPDX-License-Identifier: Apache-2.0
// Rows to expert order: y[slot] = rows[row of slot], padding slots 0.
//
// Grid (ctas, ranks), a warp a row in pieces of 1 KB: a row is read once and written for each of its slots. a: rows [R, H], c: y [S_padded, H].
// Bytes: R rows read, S_padded written. args.part = kPermuteOwn: only rows of the own rank, a is x [T, H]. kPermuteArriving: own rows from x
// (b), then the others in the order in which the sources push them, each as soon as its chunk of tokens is there; its CTAs must leave room for
// the dispatch they wait for.
#include "exchange/cuda/expert_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 2;
constexpr int kPiece = kVectors * 32 * 16;
constexpr int kArrivingThreads = 1024;

// Which rows a warp's items stand for: row(n) of n = 0 .. count - 1, -1: none. limit: rows that are read ahead lie below it.
struct AllRows {
  static constexpr bool kFromX = false, kWaits = false;
  int count, limit;
  __device__ __forceinline__ int row(int n) const { return n < count ? n : -1; }
};
struct OwnRows {
  static constexpr bool kFromX = true, kWaits = false;
  int begin, count, limit;
  __device__ __forceinline__ int row(int n) const { return n < count ? begin + n : -1; }
};
struct OtherRows {
  static constexpr bool kFromX = false, kWaits = false;
  int begin, own, count, limit;  // the own rows begin there
  __device__ __forceinline__ int row(int n) const { return n < count ? (n >= begin ? n + own : n) : -1; }
};
// The first row of each other rank, then the second, ...: as they are pushed. offsets [P + 1] in shared memory.
struct ArrivingRows {
  static constexpr bool kFromX = false, kWaits = true;
  const int* offsets;
  int P, rank, count, limit;
  std::uint32_t epoch;
  __device__ __forceinline__ int source(int n) const { return (rank + 1 + n % (P - 1)) % P; }
  __device__ __forceinline__ int row(int n) const {
    if (n >= count) return -1;
    const int s = source(n), r = offsets[s] + n / (P - 1);
    return r < offsets[s + 1] ? r : -1;
  }
};

// The pieces of one row, from `from` to each of its slots. False: its chunk did not come.
template <class Ahead>
__device__ __forceinline__ void move_row(const RankCall& call, const ExchangeShape& shape, const unsigned char* from, unsigned char* y,
                                         std::int64_t slot_stride, int row_bytes, int at, const Ahead& row, const RowSlots& first_slots, int begin, int end) {
  uint4 v[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (at + i * 512 < row_bytes) v[i] = load_row(from + at + i * 512);
  }
  row();  // reads ahead beside the row's own loads
  for (int first = begin; first < end; first += 32) {
    const RowSlots slots = first == begin ? first_slots : load_slots(shape, call, first, end, false);
    for (int j = 0; j < slots.num; ++j) {
      unsigned char* to = y + __shfl_sync(ptx::kFullWarp, slots.position, j) * slot_stride;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * 512 < row_bytes) store_row(to + at + i * 512, v[i]);
      }
    }
  }
}

// True in all lanes when the row's chunk of tokens is there.
__device__ __forceinline__ bool await_row(const ExchangeParams& q, const RankCall& call, int rank, const ArrivingRows& rows, int n, int entry) {
  bool ok = true;
  if ((threadIdx.x & 31) == 0) {
    ok = await_chunk(q, rank, kChunkRows, rows.source(n), entry / q.shape.D >> q.shape.chunk_shift, rows.epoch);
    if (!ok) record_lost(q, rank, call);
  }
  return __all_sync(ptx::kFullWarp, ok ? 1 : 0) != 0;
}

template <class Rows>
__device__ __forceinline__ void move_rows(const ExchangeParams& q, const RowsArgs& args, const RankCall& call, int rank, const Rows& rows, const void* source,
                                          int element_bytes) {
  const ExchangeShape& shape = q.shape;
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * element_bytes;
  RowItems items(rows.count, (row_bytes + kPiece - 1) / kPiece);
  if (args.parts > 0) {
    items.split(rows.count, args.parts);
  } else {
    items.split_evenly(rows.count);
  }
  const std::int64_t row_stride = args.row_stride * element_bytes, slot_stride = args.slot_stride * element_bytes;
  RowAhead<Rows::kFromX || Rows::kWaits> ahead;
  ahead.start(shape, call, rows.row(items.row(items.first)), rows.row(items.row(items.first + items.step)), rows.limit, false);
  for (int item = items.first; item < items.count; item += items.step) {
    const RowSlots first_slots = ahead.slots;
    const int begin = ahead.begin, end = ahead.end, entry = ahead.entry, row = rows.row(items.row(item));
    const int num_pieces = row < 0 ? 0 : items.end(item) - items.begin(item);
    const auto read_ahead = [&] { ahead.advance(shape, call, rows.row(items.row(item + 2 * items.step)), rows.limit, false); };
    if constexpr (Rows::kWaits) {
      if (num_pieces > 0 && !await_row(q, call, rank, rows, items.row(item), entry)) return;
    }
    const auto* from = static_cast<const unsigned char*>(source) + static_cast<std::int64_t>(Rows::kFromX ? entry / shape.D : row) * row_stride;
    for (int piece = 0; piece < num_pieces; ++piece) {
      const auto with_last = [&] {
        if (piece + 1 >= num_pieces) read_ahead();
      };
      move_row(call, shape, from, static_cast<unsigned char*>(call.c), slot_stride, row_bytes, (items.begin(item) + piece) * kPiece + lane * 16, with_last,
               first_slots, begin, end);
    }
    if (num_pieces <= 0) read_ahead();
  }
}

__device__ __forceinline__ void clear_padding(const ExchangeParams& q, const RowsArgs& args, const RankCall& call, int element_bytes) {
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * element_bytes;
  const RowItems warps(1, 1);
  for_padding(q.shape, call, warps.step, warps.first, [&](int s) {
    unsigned char* to = static_cast<unsigned char*>(call.c) + s * args.slot_stride * element_bytes;
    for (int at = lane * 16; at < row_bytes; at += 512) store_row(to + at, uint4{0, 0, 0, 0});
  });
}

__global__ void __launch_bounds__(kRowThreads, 2) exchange_permute(const __grid_constant__ ExchangeParams q, const RowsArgs args, const int element_bytes) {
  const RankCall& call = q.call[blockIdx.y];
  begin_exchange_kernel();
  const int rank = q.ranks.rank[blockIdx.y], all = header_of(call)->R;
  const int* offsets = handle_part<int>(call, q.shape.h_row_offsets);
  const int begin = all > 0 ? offsets[rank] : 0, own = all > 0 ? offsets[rank + 1] - begin : 0;
  if (args.part == kPermuteOwn) {
    move_rows(q, args, call, rank, OwnRows{begin, own, begin + own}, call.a, element_bytes);
    if (q.shape.P > 1) return;  // the others' part clears the padding
  } else if (args.part == kPermuteOthers) {
    move_rows(q, args, call, rank, OtherRows{begin, own, all - own, all}, call.a, element_bytes);
  } else {
    move_rows(q, args, call, rank, AllRows{all, all}, call.a, element_bytes);
  }
  clear_padding(q, args, call, element_bytes);
}

__global__ void __launch_bounds__(kArrivingThreads, 1)
    exchange_permute_arriving(const __grid_constant__ ExchangeParams q, const RowsArgs args, const int element_bytes) {
  __shared__ int offsets[kMaxDevicePeers + 1];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;
  const int rank = q.ranks.rank[blockIdx.y], all = header_of(call)->R;
  for (int p = static_cast<int>(threadIdx.x); p <= shape.P; p += kArrivingThreads) offsets[p] = handle_part<int>(call, shape.h_row_offsets)[p];
  __syncthreads();
  const std::uint32_t epoch = open_epoch(q, rank, kSignalArrived);
  const int begin = offsets[rank], own = offsets[rank + 1] - begin;
  move_rows(q, args, call, rank, OwnRows{begin, own, begin + own}, call.b, element_bytes);
  clear_padding(q, args, call, element_bytes);
  if (shape.P > 1) {
    int most = 0;
    for (int p = 0; p < shape.P; ++p) most = p == rank ? most : max(most, offsets[p + 1] - offsets[p]);
    move_rows(q, args, call, rank, ArrivingRows{offsets, shape.P, rank, most * (shape.P - 1), all, epoch}, call.a, element_bytes);
  }
  if (last_cta(q, rank, kTicketArriving)) close_epoch(q, rank, kSignalArrived, epoch);
}

}  // namespace

void launch_permute(const ExchangeParams& q, const RowsArgs& args, int element_bytes, int ctas, bool overlap, cudaStream_t stream) {
  if (args.part == kPermuteArriving) {
    launch_ranks(exchange_permute_arriving, ctas, kArrivingThreads, 0, overlap, stream, q, args, element_bytes);
  } else {
    launch_ranks(exchange_permute, ctas, kRowThreads, 0, overlap, stream, q, args, element_bytes);
  }
}

}  // namespace waybill::cuda
