// SPDX-License-Identifier: Apache-2.0
// Dense maps: what lies before each tile, the verdict of the budgets and the rows by source. One CTA a rank, 512 threads. Every rank has every map, so
// all come to the same verdict. valid is then 1 + the slots that every expert is padded to (layout_scan).
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/plan_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

// The verdict of the budgets, as plan() comes to it: header and status word.
__device__ __forceinline__ void conclude(const ExchangeShape& shape, int rank, const RankCall& call, const std::int64_t* demand, int slots_per_expert) {
  const int P = shape.P;
  HandleHeader header{1 + slots_per_expert, static_cast<int>(demand[rank]), static_cast<int>(demand[P + rank]), 0, 0, 0};
  for (int p = 0; p < P; ++p) {
    header.max_row_demand = demand[p] > header.max_row_demand ? demand[p] : header.max_row_demand;
    header.max_slot_demand = demand[P + p] > header.max_slot_demand ? demand[P + p] : header.max_slot_demand;
  }
  if (header.max_row_demand > shape.row_budget || header.max_slot_demand > shape.slot_budget) header.valid = header.R = header.S = 0;
  *header_of(call) = header;
  const std::int64_t rows = demand[rank], slots = demand[P + rank];
  if (rows <= shape.row_budget && slots <= shape.slot_budget) return;
  StatusWord& status = *call.status;
  status.flags |= (slots > shape.slot_budget ? kStatusSlotOverflow : 0u) | (rows > shape.row_budget ? kStatusRowOverflow : 0u);
  status.slot_demand = slots > status.slot_demand ? slots : status.slot_demand;
  status.row_demand = rows > status.row_demand ? rows : status.row_demand;
  status.slot_capacity = shape.slot_budget, status.row_capacity = shape.row_budget;
}

__global__ void __launch_bounds__(kPlanThreads) exchange_map_scan(const __grid_constant__ ExchangeParams q, const MapWindows map) {
  __shared__ std::int64_t demand[2 * kMaxDevicePeers];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], P = shape.P, num_tiles = P * shape.plan_tiles;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  int* tiles = q.window<int>(rank, map.tiles);
  for (int c = warp; c < 2 * P; c += kPlanWarps) {
    const int total = warp_scan_in_place(tiles + static_cast<std::int64_t>(c) * num_tiles, num_tiles);
    if (lane == 0) demand[c] = total;
  }
  __syncthreads();
  for (int p = static_cast<int>(threadIdx.x); p <= P; p += kPlanThreads) {
    const int before = p < P ? tiles[static_cast<std::int64_t>(rank) * num_tiles + p * shape.plan_tiles] : static_cast<int>(demand[rank]);
    handle_part<int>(call, shape.h_row_offsets)[p] = before;
  }
  if (threadIdx.x != 0) return;
  int slots_per_expert = 0;
  for (int p = 0; p < P; ++p) slots_per_expert += q.window<int>(rank, map.totals)[2 * p + 1];
  conclude(shape, rank, call, demand, slots_per_expert);
  if (q.ranks.table.control(rank)->error.state != 0) record_lost(q, rank, call);  // a barrier around the maps failed
}

}  // namespace

void launch_map_scan(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream) {
  launch_ranks(exchange_map_scan, 1, kPlanThreads, 0, false, stream, q, map);
}

}  // namespace waybill::cuda
