// SPDX-License-Identifier: Apache-2.0
// Dispatch, pull variant, for comparison: the receiver reads its rows from the sources' windows.
//
// Grid (ctas, ranks), 512 threads, a warp a (row, piece of 2 KB); all CTAs wait for the sources, so the launch must be resident. The sources'
// rows lie in a window; part[0].window is where they go in the own one. Needs the layout. Ends with kSignalRows: sources may be overwritten.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 4;
constexpr int kPiece = kVectors * 32 * 16;

__global__ void __launch_bounds__(kRowThreads)
    exchange_dispatch_pull(const __grid_constant__ ExchangeParams q, const DispatchArgs args, const std::uint64_t source_window) {
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
  const RowPart& part = args.part[0];
  const int pieces = (part.bytes + kPiece - 1) / kPiece, num_warps = static_cast<int>(gridDim.x) * (kRowThreads / 32);
  const std::int64_t items = ok ? static_cast<std::int64_t>(header.R) * pieces : 0;
  for (std::int64_t item = static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x; item < items; item += num_warps) {
    const int row = static_cast<int>(item / pieces), offset = static_cast<int>(item % pieces) * kPiece;
    const int token = handle_part<int>(call, shape.h_row_entry)[row] / shape.D;
    int source = 0;
    while (row_offsets[source + 1] <= row) ++source;
    const auto* from = q.window<unsigned char>(source, source_window) + static_cast<std::int64_t>(token) * part.stride;
    auto* to = q.window<unsigned char>(rank, part.window) + static_cast<std::int64_t>(row) * part.bytes;
    uint4 v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = offset + (i * 32 + lane) * 16;
      if (at < part.bytes) v[i] = load_row(from + at);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = offset + (i * 32 + lane) * 16;
      if (at < part.bytes) store_row(to + at, v[i]);
    }
  }
  if (!last_cta(q, rank, kTicketDispatch)) return;
  close_epoch(q, rank, kSignalReady, ready);
  post_and_await(q, rank, call, kSignalRows);
}

}  // namespace

const void* dispatch_pull_kernel() { return reinterpret_cast<const void*>(&exchange_dispatch_pull); }

void launch_dispatch_pull(const ExchangeParams& q, const DispatchArgs& args, std::uint64_t source_window, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_dispatch_pull, ctas, kRowThreads, 0, overlap, stream, q, args, source_window);
}

}  // namespace waybill::cuda
