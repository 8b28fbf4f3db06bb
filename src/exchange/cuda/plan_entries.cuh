// SPDX-License-Identifier: Apache-2.0
// What the plan does once places are known: the tokens' entries, and ids, weights and row metadata pushed to the destinations. The slots of a
// tile that go to one rank are neighbours there: they are put together in shared memory and written as one run.
#pragma once

#include "exchange/cuda/plan_tile.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {

// Shared memory of a tile; the host asks for its size.
struct FillLayout {
  std::uint32_t weights, counts, slot_start, ids, row_start, bytes;
  WB_HD FillLayout(int P, int K, int local_id_bytes) {
    const std::uint32_t cells = static_cast<std::uint32_t>(kPlanTile * P), slots = static_cast<std::uint32_t>(kPlanTile * K);
    weights = 0;
    counts = weights + slots * 4;
    slot_start = counts + cells * 2;
    ids = slot_start + cells * 2;
    row_start = ids + slots * static_cast<std::uint32_t>(local_id_bytes);
    bytes = row_start + cells;
  }
};

struct TileBases {
  int rows[kMaxDevicePeers], slots[kMaxDevicePeers];  // place of the tile's first row and slot at each destination
  int num_slots[kMaxDevicePeers], stage[kMaxDevicePeers];
};

// What lies before each token within the tile, for one rank. One warp; a lane has two tokens.
__device__ __forceinline__ void scan_tokens(const std::uint16_t* counts, int P, int r, std::uint16_t* slot_start, std::uint8_t* row_start, int* num_slots) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int a = counts[2 * lane * P + r], b = counts[(2 * lane + 1) * P + r];
  const int rows_a = a > 0 ? 1 : 0, sum = (a + b) << 8 | (rows_a + (b > 0 ? 1 : 0));  // rows <= 64 fit in 8 bits
  const int scan = warp_inclusive(sum);
  const int before = scan - sum, rows = before & 0xff, slots = before >> 8;
  slot_start[2 * lane * P + r] = static_cast<std::uint16_t>(slots);
  slot_start[(2 * lane + 1) * P + r] = static_cast<std::uint16_t>(slots + a);
  row_start[2 * lane * P + r] = static_cast<std::uint8_t>(rows);
  row_start[(2 * lane + 1) * P + r] = static_cast<std::uint8_t>(rows + rows_a);
  if (lane == 31) *num_slots = scan >> 8;
}

// The destinations of one token in rank order. One warp.
__device__ __forceinline__ void write_entries(const ExchangeParams& q, const RankCall& call, int t, const std::uint16_t* counts,
                                              const std::uint16_t* slot_start, const std::uint8_t* row_start, const TileBases& base) {
  const ExchangeShape& shape = q.shape;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  auto* entries = handle_part<RowEntry>(call, shape.h_entries) + static_cast<std::int64_t>(t) * shape.D;
  int used = 0;
  for (int r0 = 0; r0 < shape.P; r0 += 32) {
    const int r = r0 + lane, n = r < shape.P ? counts[r] : 0;
    const unsigned present = __ballot_sync(ptx::kFullWarp, n > 0);
    if (n > 0) {
      const int d = used + __popc(present & ptx::lanemask_lt());
      const RowEntry entry{r, base.rows[r] + row_start[r], base.slots[r] + slot_start[r], n};
      entries[d] = entry;
      q.window<RowMeta>(r, shape.row_meta)[entry.row] = RowMeta{entry.slot_begin, t * shape.D + d};
    }
    used += __popc(present);
  }
  for (int d = used + lane; d < shape.D; d += 32) entries[d] = RowEntry{-1, 0, 0, 0};
}

// One tile. smem: FillLayout, its counts are there. Ends with kSignalMeta by the last CTA.
template <class LocalId, int kChunks>
__device__ __forceinline__ void fill_tile(const ExchangeParams& q, int rank, const RankCall& call, int tile, const TileRoutes<kChunks>& routes,
                                          const float (&weights)[kTokensPerWarp][kChunks], unsigned char* smem, TileBases& base) {
  const ExchangeShape& shape = q.shape;
  const int P = shape.P, warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int first = tile * kPlanTile, num_tokens = min(kPlanTile, max(0, call.T - first));
  const FillLayout layout(P, shape.K, sizeof(LocalId));
  auto* counts = reinterpret_cast<std::uint16_t*>(smem + layout.counts);
  auto* slot_start = reinterpret_cast<std::uint16_t*>(smem + layout.slot_start);
  auto* row_start = smem + layout.row_start;
  auto* stage_ids = reinterpret_cast<LocalId*>(smem + layout.ids);
  auto* stage_weights = reinterpret_cast<float*>(smem + layout.weights);
  for (int r = static_cast<int>(threadIdx.x); r < P; r += kPlanThreads) {
    const int* own = handle_part<int>(call, shape.h_base);
    const int* tiles = q.window<int>(rank, shape.tile_counts);
    base.rows[r] = __ldcg(own + r) + __ldcg(tiles + r * shape.plan_tiles + tile);
    base.slots[r] = __ldcg(own + P + r) + __ldcg(tiles + (P + r) * shape.plan_tiles + tile);
  }
  for (int r = warp; r < P; r += kPlanWarps) scan_tokens(counts, P, r, slot_start, row_start, &base.num_slots[r]);
  __syncthreads();
  if (warp == 0) {  // places in the stage, ranks in order
    int carry = 0;
    for (int r0 = 0; r0 < P; r0 += 32) {
      const int n = r0 + lane < P ? base.num_slots[r0 + lane] : 0;
      const int scan = warp_inclusive(n);
      if (r0 + lane < P) base.stage[r0 + lane] = carry + scan - n;
      carry += __shfl_sync(ptx::kFullWarp, scan, 31);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTokensPerWarp; ++i) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int r = routes.rank[i][c];
      if (r < 0) continue;
      const int place = base.stage[r] + slot_start[tile_token(i) * P + r] + routes.before[i][c];
      stage_ids[place] = static_cast<LocalId>(local_of_id(shape, routes.id[i][c], r));
      stage_weights[place] = weights[i][c];
    }
  }
  for (int token = warp; token < num_tokens; token += kPlanWarps) {
    write_entries(q, call, first + token, counts + token * P, slot_start + token * P, row_start + token * P, base);
  }
  __syncthreads();
  const int warps_per_rank = max(1, kPlanWarps / P);
  for (int r = warp / warps_per_rank; r < P; r += kPlanWarps / warps_per_rank) {
    auto* to_ids = q.window<LocalId>(r, shape.slot_ids) + base.slots[r];
    auto* to_weights = q.window<float>(r, shape.slot_weights) + base.slots[r];
    for (int i = warp % warps_per_rank * 32 + lane; i < base.num_slots[r]; i += warps_per_rank * 32) {
      if (shape.send_weights != 0) to_weights[i] = stage_weights[base.stage[r] + i];
      to_ids[i] = stage_ids[base.stage[r] + i];
    }
  }
  if (last_cta(q, rank, kTicketPlanFill)) post_only(q, rank, kSignalMeta);
}

}  // namespace waybill::cuda
