// SPDX-License-Identifier: Apache-2.0
// Dense maps: what the compact plan pushes, made by each rank itself from the map of all tokens. As a receiver: row metadata, local ids and weights of
// its experts' columns, slots of a row in expert order. As a source: the entries of its tokens. Behind it layout() and all else is as after plan().
//
// Grid (P plan_tiles, ranks), 512 threads. Nothing is done on an invalid handle. Posts kSignalMeta.
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/map_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

struct Places {
  int *counts, *slots;  // [64][P]: slots of each token, and those of the tile's tokens before it
  std::uint8_t* rows;   // [64][P]: rows before it
};

// One warp, one rank; a lane has two tokens.
__device__ __forceinline__ void scan_places(const Places& at, int P, int r) {
  const int lane = static_cast<int>(threadIdx.x) & 31, first = 2 * lane * P + r, second = first + P;
  const int a = at.counts[first], b = at.counts[second], rows_a = a > 0 ? 1 : 0, num_rows = rows_a + (b > 0 ? 1 : 0);
  const int slots = warp_inclusive(a + b) - a - b, rows = warp_inclusive(num_rows) - num_rows;
  at.slots[first] = slots, at.slots[second] = slots + a;
  at.rows[first] = static_cast<std::uint8_t>(rows), at.rows[second] = static_cast<std::uint8_t>(rows + rows_a);
}

// The row of token i of the tile at this rank. One warp.
template <class LocalId>
__device__ __forceinline__ void write_row(const ExchangeParams& q, const MapWindows& map, int rank, const MapTile& tile, int i, int row, int slot, int entry) {
  const ExchangeShape& shape = q.shape;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* cells = q.window<std::uint8_t>(rank, map.cells) + (tile.row + i) * shape.E;
  const auto* weights = q.window<float>(rank, map.weights) + (tile.row + i) * shape.E;
  if (lane == 0) q.window<RowMeta>(rank, shape.row_meta)[row] = RowMeta{slot, entry};
#pragma unroll 1
  for (int e0 = 0; e0 < shape.E; e0 += 32) {
    const int e = e0 + lane;
    const bool mine = e < shape.E && cells[e] != 0 && rank_of_id(shape, e) == rank;
    const unsigned set = __ballot_sync(ptx::kFullWarp, mine);
    if (mine) {
      const int to = slot + __popc(set & ptx::lanemask_lt());
      q.window<LocalId>(rank, shape.slot_ids)[to] = static_cast<LocalId>(local_of_id(shape, e, rank));
      q.window<float>(rank, shape.slot_weights)[to] = weights[e];
    }
    slot += __popc(set);
  }
}

template <class LocalId>
__global__ void __launch_bounds__(kPlanThreads) exchange_map_fill(const __grid_constant__ ExchangeParams q, const MapWindows map) {
  extern __shared__ __align__(16) int smem[];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], P = shape.P, num_tiles = P * shape.plan_tiles;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  if (header_of(call)->valid == 0) return;
  const Places at{smem, smem + kPlanTile * P, reinterpret_cast<std::uint8_t*>(smem + 2 * kPlanTile * P)};
  const MapTile tile = map_tile(q, map, rank);
  count_map_tile(q, map, rank, tile, at.counts);
  for (int r = warp; r < P; r += kPlanWarps) scan_places(at, P, r);
  __syncthreads();
  const int* tiles = q.window<int>(rank, map.tiles) + blockIdx.x;
  const auto row_at = [&](int i, int r) { return tiles[static_cast<std::int64_t>(r) * num_tiles] + at.rows[i * P + r]; };
  const auto slot_at = [&](int i, int r) { return tiles[static_cast<std::int64_t>(P + r) * num_tiles] + at.slots[i * P + r]; };
#pragma unroll 1
  for (int i = warp; i < tile.num_tokens; i += kPlanWarps) {
    const int t = tile.first + i;
    auto* entries = handle_part<RowEntry>(call, shape.h_entries) + static_cast<std::int64_t>(t) * shape.D;
    int used = 0, own = 0;
    for (int r0 = 0; r0 < P; r0 += 32) {
      const int r = r0 + lane, n = r < P ? at.counts[i * P + r] : 0;
      const unsigned present = __ballot_sync(ptx::kFullWarp, n > 0);
      const int d = used + __popc(present & ptx::lanemask_lt());
      if (n > 0 && tile.source == rank) entries[d] = RowEntry{r, row_at(i, r), slot_at(i, r), n};
      if (rank >= r0 && rank < r0 + 32) own = __shfl_sync(ptx::kFullWarp, d, rank - r0);
      used += __popc(present);
    }
    for (int d = used + lane; d < shape.D && tile.source == rank; d += 32) entries[d] = RowEntry{-1, 0, 0, 0};
    if (at.counts[i * P + rank] > 0) write_row<LocalId>(q, map, rank, tile, i, row_at(i, rank), slot_at(i, rank), t * shape.D + own);
  }
  if (last_cta(q, rank, kTicketPlanFill)) post_only(q, rank, kSignalMeta);
}

}  // namespace

void launch_map_fill(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream) {
  const auto smem = static_cast<std::size_t>(kPlanTile * q.shape.P) * 9;
  launch_ranks(q.shape.local_id_bytes == 2 ? exchange_map_fill<std::int16_t> : exchange_map_fill<std::int32_t>, q.shape.P * q.shape.plan_tiles, kPlanThreads,
               smem, false, stream, q, map);
}

}  // namespace waybill::cuda
