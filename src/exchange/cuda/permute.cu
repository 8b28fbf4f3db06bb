// SPDX-License-Identifier: Apache-2.0
// Rows to expert order: y[slot] = rows[row of slot], padding slots 0.
//
// Grid (ctas, ranks), 512 threads, a warp a row in pieces of 1 KB: a row is read once and written for each of its slots. a: rows [R, H],
// c: y [S_padded, H]. Bytes: R rows read, S_padded written. args.part = kPermuteOwn: only rows of the own rank, a is x [T, H].
#include "exchange/cuda/expert_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 2;
constexpr int kPiece = kVectors * 32 * 16;

__global__ void __launch_bounds__(kRowThreads, 2) exchange_permute(const __grid_constant__ ExchangeParams q, const RowsArgs args, const int element_bytes) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * element_bytes;
  begin_exchange_kernel();
  // Rows of the part: `skip` of them lie before the own rank's, `gap` rows are left out there.
  const int rank = q.ranks.rank[blockIdx.y], all = header_of(call)->R;
  const int own_begin = all > 0 ? handle_part<int>(call, shape.h_row_offsets)[rank] : 0;
  const int own = all > 0 ? handle_part<int>(call, shape.h_row_offsets)[rank + 1] - own_begin : 0;
  const bool only_own = args.part == kPermuteOwn, only_others = args.part == kPermuteOthers;
  const int R = only_own ? own : (only_others ? all - own : all);
  const auto row_at = [&](int r) { return only_own ? own_begin + min(r, own) : (only_others && r >= own_begin ? r + own : r); };
  const RowItems items(R, (row_bytes + kPiece - 1) / kPiece);
  const auto* rows = static_cast<const unsigned char*>(call.a);
  auto* y = static_cast<unsigned char*>(call.c);
  const std::int64_t row_stride = args.row_stride * element_bytes, slot_stride = args.slot_stride * element_bytes;
  RowAhead ahead;
  const auto limit = only_own ? own_begin + own : all;  // rows that fetches may reach
  ahead.start(shape, call, row_at(items.row(items.first)), row_at(items.row(items.first + items.step)), limit, false);
  for (int item = items.first; item < items.count; item += items.step) {
    const RowSlots first_slots = ahead.slots;
    const int begin = ahead.begin, end = ahead.end, row = row_at(items.row(item));
    const std::int64_t from = only_own ? handle_part<int>(call, shape.h_row_entry)[row] / shape.D : row;
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      const int at = piece * kPiece + lane * 16;
      uint4 v[kVectors] = {};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * 512 < row_bytes) v[i] = load_row(rows + from * row_stride + at + i * 512);
      }
      if (piece + 1 >= items.end(item)) ahead.advance(shape, call, row_at(items.row(item + 2 * items.step)), limit, false);  // beside the row's own loads
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
    if (items.begin(item) >= items.end(item)) ahead.advance(shape, call, row_at(items.row(item + 2 * items.step)), limit, false);
  }
  if (only_own) return;
  for_padding(shape, call, items.step, items.first, [&](int s) {
    for (int at = lane * 16; at < row_bytes; at += 512) store_row(y + s * slot_stride + at, uint4{0, 0, 0, 0});
  });
}

}  // namespace

void launch_permute(const ExchangeParams& q, const RowsArgs& args, int element_bytes, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_permute, ctas, kRowThreads, 0, overlap, stream, q, args, element_bytes);
}

}  // namespace waybill::cuda
