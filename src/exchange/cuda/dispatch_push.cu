// SPDX-License-Identifier: Apache-2.0
// Dispatch: each token's row is read once and written to its place at every rank that needs it. Plain loads and stores: any GPU.
//
// Grid (ctas, ranks), 512 threads, a warp a (token, piece of 2 KB). a: rows [T, bytes], b: second part (scales) or null. With
// args.handshake all CTAs wait until every rank may be written to, so that the whole launch must be resident.
// Bytes: T rows read, one row written for each (token, rank). Ends with kSignalRows from all ranks: the rows of all peers are here.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kVectors = 4;                 // 16-byte loads of a lane in flight
constexpr int kPiece = kVectors * 32 * 16;  // bytes

__device__ __forceinline__ void push_piece(const ExchangeParams& q, const RowPart& part, const void* source, int t, int offset, const RowEntry& entry,
                                           int num_entries) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* row = static_cast<const unsigned char*>(source) + t * part.stride;
  uint4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = offset + (i * 32 + lane) * 16;
    if (at < part.bytes) v[i] = load_row(row + at);
  }
  for (int d = 0; d < num_entries; ++d) {
    const int rank = __shfl_sync(ptx::kFullWarp, entry.rank, d), place = __shfl_sync(ptx::kFullWarp, entry.row, d);
    unsigned char* to = q.window<unsigned char>(rank, part.window) + static_cast<std::int64_t>(place) * part.bytes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = offset + (i * 32 + lane) * 16;
      if (at < part.bytes) store_row(to + at, v[i]);
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) exchange_dispatch_push(const __grid_constant__ ExchangeParams q, const DispatchArgs args) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], lane = static_cast<int>(threadIdx.x) & 31;
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;
  const std::uint32_t ready = open_epoch(q, rank, kSignalReady);
  bool ok = true;
  if (args.handshake != 0) {
    // Rows may go to the window of partials: peers must have read what it held.
    if (blockIdx.x == 0 && await_posted(q, rank, kSignalPulled)) post_signal(q, rank, kSignalReady, ready);
    ok = await_signal(q, rank, kSignalReady, ready);
    if (!ok) mark_lost(q, rank, call);
  }
  const auto* entries = handle_part<RowEntry>(call, shape.h_entries);
  const int pieces = (args.part[0].bytes + kPiece - 1) / kPiece;
  const int num_warps = static_cast<int>(gridDim.x) * (kRowThreads / 32);
  const std::int64_t items = ok ? static_cast<std::int64_t>(call.T) * pieces : 0;
  for (std::int64_t item = static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x; item < items; item += num_warps) {
    const int t = static_cast<int>(item / pieces), piece = static_cast<int>(item % pieces);
    for (int d0 = 0; d0 < shape.D; d0 += 32) {
      const RowEntry entry = d0 + lane < shape.D ? entries[static_cast<std::int64_t>(t) * shape.D + d0 + lane] : RowEntry{-1, 0, 0, 0};
      const int num = __popc(__ballot_sync(ptx::kFullWarp, entry.rank >= 0));
      if (num == 0) break;
      push_piece(q, args.part[0], call.a, t, piece * kPiece, entry, num);
      for (int offset = 0; piece == 0 && offset < args.part[1].bytes; offset += kPiece) push_piece(q, args.part[1], call.b, t, offset, entry, num);
    }
  }
  if (!last_cta(q, rank, kTicketDispatch)) return;
  if (args.handshake != 0) close_epoch(q, rank, kSignalReady, ready);
  post_and_await(q, rank, call, kSignalRows);
}

}  // namespace

const void* dispatch_push_kernel() { return reinterpret_cast<const void*>(&exchange_dispatch_push); }

void launch_dispatch_push(const ExchangeParams& q, const DispatchArgs& args, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_dispatch_push, ctas, kRowThreads, 0, overlap, stream, q, args);
}

}  // namespace waybill::cuda
