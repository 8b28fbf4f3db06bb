// SPDX-License-Identifier: Apache-2.0
// Rows to expert order: y[slot] = rows[row of slot], padding slots 0.
//
// Grid (ctas, ranks), 512 threads, a warp a (row, piece of 1 KB): a row is read once and written for each of its slots. a: rows [R, H],
// c: y [S_padded, H]. Bytes: R rows read, S_padded written.
#include "exchange/cuda/expert_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 2;
constexpr int kPiece = kVectors * 32 * 16;

__global__ void __launch_bounds__(kRowThreads) exchange_permute(const __grid_constant__ ExchangeParams q, const RowsArgs args, const int element_bytes) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, row_bytes = args.H * element_bytes;
  begin_exchange_kernel();
  const int R = header_of(call)->R, pieces = (row_bytes + kPiece - 1) / kPiece;
  const int warp = static_cast<int>(threadIdx.x >> 5) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int num_warps = static_cast<int>(gridDim.x) * (kRowThreads / 32);
  const auto* rows = static_cast<const unsigned char*>(call.a);
  auto* y = static_cast<unsigned char*>(call.c);
  const std::int64_t row_stride = args.row_stride * element_bytes, slot_stride = args.slot_stride * element_bytes;
  NextRow next = fetch_row(shape, call, warp / pieces, R, false);
  for (std::int64_t item = warp; item < static_cast<std::int64_t>(R) * pieces; item += num_warps) {
    const auto row = static_cast<int>(item / pieces);
    const int at = static_cast<int>(item % pieces) * kPiece + lane * 16;
    const NextRow own = next;
    uint4 v[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (at + i * 512 < row_bytes) v[i] = load_row(rows + row * row_stride + at + i * 512);
    }
    next = fetch_row(shape, call, (item + num_warps) / pieces, R, false);
    for (int first = own.begin; first < own.end; first += 32) {
      const RowSlots slots = first == own.begin ? own.slots : load_slots(shape, call, first, own.end, false);
      for (int j = 0; j < slots.num; ++j) {
        unsigned char* to = y + __shfl_sync(ptx::kFullWarp, slots.position, j) * slot_stride;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * 512 < row_bytes) store_row(to + at + i * 512, v[i]);
        }
      }
    }
  }
  for_padding(shape, call, num_warps, warp, [&](int s) {
    for (int at = lane * 16; at < row_bytes; at += 512) store_row(y + s * slot_stride + at, uint4{0, 0, 0, 0});
  });
}

}  // namespace

void launch_permute(const ExchangeParams& q, const RowsArgs& args, int element_bytes, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_permute, ctas, kRowThreads, 0, overlap, stream, q, args, element_bytes);
}

}  // namespace waybill::cuda
