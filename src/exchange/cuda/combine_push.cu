// SPDX-License-Identifier: Apache-2.0
// Combine, push variant: each rank writes its partials into the source's slot of the (token, rank); combine_pull then adds them locally.
//
// Grid (ctas, ranks), 512 threads, a warp a (row, piece of 2 KB); all CTAs wait until every source's slots may be written. The partials
// [R, H] lie in args.window, the slots [T_max * D, H] in args.slots. Needs the layout. Ends with kSignalSlots from all ranks.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 4;
constexpr int kPiece = kVectors * 32 * 16;

__global__ void __launch_bounds__(kRowThreads) exchange_combine_push(const __grid_constant__ ExchangeParams q, const CombineArgs args, const int row_bytes) {
  __shared__ int row_offsets[kMaxDevicePeers + 1];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], lane = static_cast<int>(threadIdx.x) & 31;
  begin_exchange_kernel();
  const HandleHeader header = *header_of(call);
  if (header.valid == 0) return;
  for (int p = static_cast<int>(threadIdx.x); p <= shape.P; p += kRowThreads) row_offsets[p] = handle_part<int>(call, shape.h_row_offsets)[p];
  const std::uint32_t ready = open_epoch(q, rank, kSignalReady);
  if (blockIdx.x == 0) post_signal(q, rank, kSignalReady, ready);
  const bool ok = await_signal(q, rank, kSignalReady, ready);
  if (!ok) mark_lost(q, rank, call);
  const int pieces = (row_bytes + kPiece - 1) / kPiece, num_warps = static_cast<int>(gridDim.x) * (kRowThreads / 32);
  const std::int64_t items = ok ? static_cast<std::int64_t>(header.R) * pieces : 0;
  for (std::int64_t item = static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x; item < items; item += num_warps) {
    const int row = static_cast<int>(item / pieces), offset = static_cast<int>(item % pieces) * kPiece;
    int source = 0;
    while (row_offsets[source + 1] <= row) ++source;
    const std::int64_t slot = handle_part<int>(call, shape.h_row_entry)[row];
    const auto* from = q.window<unsigned char>(rank, args.window) + static_cast<std::int64_t>(row) * row_bytes;
    auto* to = q.window<unsigned char>(source, args.slots) + slot * row_bytes;
    uint4 v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = offset + (i * 32 + lane) * 16;
      if (at < row_bytes) v[i] = load_row(from + at);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = offset + (i * 32 + lane) * 16;
      if (at < row_bytes) store_row(to + at, v[i]);
    }
  }
  if (!last_cta(q, rank, kTicketCombine)) return;
  close_epoch(q, rank, kSignalReady, ready);
  post_and_await(q, rank, call, kSignalSlots);
}

}  // namespace

const void* combine_push_kernel() { return reinterpret_cast<const void*>(&exchange_combine_push); }

void launch_combine_push(const ExchangeParams& q, const CombineArgs& args, RowType wire, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_combine_push, ctas, kRowThreads, 0, overlap, stream, q, args, args.H * (wire == RowType::kF32 ? 4 : 2));
}

}  // namespace waybill::cuda
