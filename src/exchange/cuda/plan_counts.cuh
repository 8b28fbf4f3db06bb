// SPDX-License-Identifier: Apache-2.0
// What the plan does with the counts of a tile: totals to every peer, and offsets, demand and the verdict of the budgets from theirs.
#pragma once

#include "exchange/cuda/plan_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {

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

// Rows and slots of this CTA's tile for every rank, and its bad ids. Before: num_bad = 0 and a barrier.
__device__ __forceinline__ void write_tile_counts(const ExchangeParams& q, int rank, const RankCall& call, const std::uint16_t* counts, int bad, int& num_bad) {
  const ExchangeShape& shape = q.shape;
  const int P = shape.P, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
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
}

// By the last CTA: totals to every peer, theirs read, the handle's header and offsets written. A lost peer leaves an invalid handle.
__device__ __forceinline__ void exchange_counts(const ExchangeParams& q, int rank, const RankCall& call, int num_tiles, CountsStorage& s) {
  const ExchangeShape& shape = q.shape;
  const int P = shape.P, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  int* tile_counts = q.window<int>(rank, shape.tile_counts);

  for (int c = warp; c < 2 * P; c += kPlanWarps) {
    const int total = warp_scan_in_place(tile_counts + c * shape.plan_tiles, num_tiles);
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
  if (await_signal(q, rank, kSignalCounts, epoch, /*is_counted=*/true)) {
    read_matrix(q, rank, call, q.window<int>(rank, shape.counts) + parity * 2 * P, s);
  } else {
    if (threadIdx.x == 0) *header_of(call) = HandleHeader{};
    mark_lost(q, rank, call);
  }
  close_epoch(q, rank, kSignalCounts, epoch);
}

}  // namespace waybill::cuda
