// SPDX-License-Identifier: Apache-2.0
// Plan, first half: rows and slots of every (tile, rank), the totals of all ranks, and what follows from them.
//
// Grid (tiles of 64 tokens, ranks), 512 threads, a warp a token at a time. a: ids [T, K] int16 or int32.
// The last CTA scans the tiles, pushes [2P] totals to every peer and waits for theirs. All ranks then hold the same matrix: each computes
// its own offsets and the verdict of the budgets, alike on every rank.
// Bytes: T * K ids read, 8 P T / 64 of tile counts written and read twice, 8 P^2 over the links.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

struct CountsStorage {
  int totals[2 * kMaxDevicePeers];           // of this rank
  int own[2][kMaxDevicePeers];               // rows and slots that come from each source
  std::int64_t demand[2 * kMaxDevicePeers];  // rows, then slots, of each rank
};

// Offsets, demand and verdict from the matrix [P sources][2P].
__device__ __forceinline__ void read_matrix(const ExchangeParams& q, int rank, const RankCall& call, const int* matrix, CountsStorage& s) {
  const ExchangeShape& shape = q.shape;
  const int P = shape.P, tid = static_cast<int>(threadIdx.x);
  int* base = handle_part<int>(call, shape.h_base);
  for (int c = tid; c < 2 * P; c += kPlanThreads) {
    int before = 0;
    std::int64_t sum = 0;
#pragma unroll 4
    for (int p = 0; p < P; ++p) {
      const int n = __ldcg(matrix + p * 2 * P + c);
      if (p < rank) before += n;
      if (c % P == rank) s.own[c / P][p] = n;
      sum += n;
    }
    base[c] = before;
    s.demand[c] = sum;
  }
  __syncthreads();
  for (int p = tid; p <= P; p += kPlanThreads) {
    int before = 0;
    for (int source = 0; source < p; ++source) before += s.own[0][source];
    handle_part<int>(call, shape.h_row_offsets)[p] = before;
  }
  if (tid != 0) return;
  HandleHeader header{1, static_cast<int>(s.demand[rank]), static_cast<int>(s.demand[P + rank]), 0, 0, 0};
  for (int p = 0; p < P; ++p) {
    header.max_row_demand = s.demand[p] > header.max_row_demand ? s.demand[p] : header.max_row_demand;
    header.max_slot_demand = s.demand[P + p] > header.max_slot_demand ? s.demand[P + p] : header.max_slot_demand;
  }
  const bool rows_fit = header.max_row_demand <= shape.row_budget, slots_fit = header.max_slot_demand <= shape.slot_budget;
  header.valid = rows_fit && slots_fit ? 1 : 0;
  if (header.valid == 0) header.R = header.S = 0;
  *header_of(call) = header;
  const std::int64_t rows = s.demand[rank], slots = s.demand[P + rank];
  if (rows <= shape.row_budget && slots <= shape.slot_budget) return;
  StatusWord& status = *call.status;
  status.flags |= (slots > shape.slot_budget ? kStatusSlotOverflow : 0u) | (rows > shape.row_budget ? kStatusRowOverflow : 0u);
  status.slot_demand = slots > status.slot_demand ? slots : status.slot_demand;
  status.row_demand = rows > status.row_demand ? rows : status.row_demand;
  status.slot_capacity = shape.slot_budget, status.row_capacity = shape.row_budget;
}

template <class Id, int kChunks>
__global__ void __launch_bounds__(kPlanThreads) exchange_plan_count(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) std::uint16_t counts[];  // [64][P]
  __shared__ CountsStorage s;
  __shared__ int num_bad;
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], P = shape.P;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int first = static_cast<int>(blockIdx.x) * kPlanTile, num_tokens = min(kPlanTile, max(0, call.T - first));
  begin_exchange_kernel();
  if (threadIdx.x == 0) num_bad = 0;
  TileRoutes<kChunks> routes;
  const int bad = count_tile(shape, static_cast<const Id*>(call.a), first, num_tokens, counts, routes);
  if (lane == 0 && bad > 0) atomicAdd(&num_bad, bad);
  int* tile_counts = q.window<int>(rank, shape.tile_counts);
  for (int r = warp; r < P; r += kPlanWarps) {
    const unsigned a = counts[lane * P + r], b = counts[(lane + 32) * P + r];
    const unsigned rows = ptx::redux_add((a > 0 ? 1u : 0u) + (b > 0 ? 1u : 0u)), slots = ptx::redux_add(a + b);
    if (lane == 0) {
      tile_counts[r * shape.plan_tiles + static_cast<int>(blockIdx.x)] = static_cast<int>(rows);
      tile_counts[(P + r) * shape.plan_tiles + static_cast<int>(blockIdx.x)] = static_cast<int>(slots);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && num_bad > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&call.status->num_bad_ids), static_cast<unsigned long long>(num_bad));
    atomicOr(&call.status->flags, static_cast<std::uint32_t>(kStatusBadId));
  }
  if (!last_cta(q, rank, kTicketPlanCount)) return;

  for (int c = warp; c < 2 * P; c += kPlanWarps) {
    const int total = warp_scan_in_place(tile_counts + c * shape.plan_tiles, static_cast<int>(gridDim.x));
    if (lane == 0) s.totals[c] = total;
  }
  __syncthreads();
  const std::uint32_t epoch = open_epoch(q, rank, kSignalCounts);
  const int parity = static_cast<int>(epoch & 1u) * P;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * P * P; i += kPlanThreads) {
    q.window<int>(i / (2 * P), shape.counts)[(parity + rank) * 2 * P + i % (2 * P)] = s.totals[i % (2 * P)];
  }
  __syncthreads();
  post_signal(q, rank, kSignalCounts, epoch);
  if (await_signal(q, rank, kSignalCounts, epoch)) {
    read_matrix(q, rank, call, q.window<int>(rank, shape.counts) + parity * 2 * P, s);
  } else {
    if (threadIdx.x == 0) *header_of(call) = HandleHeader{};
    mark_lost(q, rank, call);
  }
  close_epoch(q, rank, kSignalCounts, epoch);
}

}  // namespace

void launch_plan_count(const ExchangeParams& q, int num_tiles, bool overlap, cudaStream_t stream) {
  const std::size_t smem = static_cast<std::size_t>(kPlanTile * q.shape.P) * 2;
  with_chunks(q.shape.K, [&](auto chunks) {
    constexpr int kChunks = decltype(chunks)::value;
    launch_ranks(q.shape.id_bytes == 2 ? exchange_plan_count<std::int16_t, kChunks> : exchange_plan_count<std::int32_t, kChunks>, num_tiles, kPlanThreads, smem,
                 overlap, stream, q);
  });
}

}  // namespace waybill::cuda
