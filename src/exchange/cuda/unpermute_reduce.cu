// SPDX-License-Identifier: Apache-2.0
// Expert order to rows: z[row] = sum over the row's slots in order k of (weight) * y[slot], in fp32, rounded once at the end.
//
// Grid (ctas, ranks), 512 threads, a warp a row (or a part of it) in pieces of 1 KB of y, four slots in flight. a: y [S_padded, H], c: z [R,
// H]; z may be a window that peers read: args.await_pulled then waits until they have read the former partials. The sum starts with the first slot; a row
// without slots is 0. Bytes: S rows read, R written.
#include "exchange/cuda/expert_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = kRowThreads;
constexpr int kVectors = 2;
constexpr int kBatch = 4;  // slots in flight
constexpr int kPiece = kVectors * 32 * 16;

template <class Y, class Z>
__device__ __forceinline__ void reduce_piece(const ExchangeParams& q, const RowsArgs& args, const RankCall& call, const RowSlots& first_slots, int begin,
                                             int end, int row, int at) {
  constexpr int kValues = Vector<Y>::kValues;
  const int row_bytes = args.H * static_cast<int>(sizeof(Y));
  const Y* y = static_cast<const Y*>(call.a);
  float sum[kVectors][kValues] = {};
  for (int first = begin; first < end; first += 32) {
    const RowSlots slots = first == begin ? first_slots : load_slots(q.shape, call, first, end, args.weighted != 0);
    for (int j0 = 0; j0 < slots.num; j0 += kBatch) {
      uint4 v[kBatch][kVectors];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int position = __shfl_sync(ptx::kFullWarp, slots.position, (j0 + j) & 31);
        const auto* from = reinterpret_cast<const unsigned char*>(y + position * args.slot_stride);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (j0 + j < slots.num && at + i * 512 < row_bytes) v[j][i] = load_row(from + at + i * 512);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float weight = __shfl_sync(ptx::kFullWarp, slots.weight, (j0 + j) & 31);
        if (j0 + j >= slots.num) continue;
        const bool is_first = first == begin && j0 + j == 0;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          float x[kValues];
          Vector<Y>::to_float(v[j][i], x);
#pragma unroll
          for (int n = 0; n < kValues; ++n) {
            const float part = args.weighted != 0 ? weight * x[n] : x[n];
            sum[i][n] = is_first ? part : sum[i][n] + part;
          }
        }
      }
    }
  }
  Z* z = static_cast<Z*>(call.c) + row * args.row_stride;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (at + i * 512 < row_bytes) store_values<Z>(z + (at + i * 512) / static_cast<int>(sizeof(Y)), sum[i]);
  }
}

template <class Y, class Z>
__global__ void __launch_bounds__(kThreads) exchange_unpermute_reduce(const __grid_constant__ ExchangeParams q, const RowsArgs args) {
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], lane = static_cast<int>(threadIdx.x) & 31;
  begin_exchange_kernel();
  if (args.await_pulled != 0 && !await_posted(q, rank, kSignalPulled)) return mark_lost(q, rank, call);
  const int R = header_of(call)->R;
  const bool weighted = args.weighted != 0;
  const RowItems items(R, (args.H * static_cast<int>(sizeof(Y)) + kPiece - 1) / kPiece);
  RowAhead<false> ahead;
  ahead.start(q.shape, call, items.row(items.first), items.row(items.first + items.step), R, weighted);
  for (int item = items.first; item < items.count; item += items.step) {
    const RowSlots slots = ahead.slots;
    const int begin = ahead.begin, end = ahead.end;
    ahead.advance(q.shape, call, items.row(item + 2 * items.step), R, weighted);
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      reduce_piece<Y, Z>(q, args, call, slots, begin, end, items.row(item), piece * kPiece + lane * 16);
    }
  }
}

}  // namespace

void launch_unpermute_reduce(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType z, int ctas, bool overlap, cudaStream_t stream) {
  with_row_type(y, [&](auto* from) {
    with_row_type(z, [&](auto* to) {
      launch_ranks(exchange_unpermute_reduce<std::remove_pointer_t<decltype(from)>, std::remove_pointer_t<decltype(to)>>, ctas, kThreads, 0, overlap, stream, q,
                   args);
    });
  });
}

}  // namespace waybill::cuda
