// SPDX-License-Identifier: Apache-2.0
// Per-slot scalars read back from the ranks of their experts: the one loop behind slot_values_return (routes) and map_values (dense maps).
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {

// out [T, width]: id_at(t, column) says which expert column c of token t stands for (outside [0, E): none, 0), in the order in which the plan numbered
// the token's slots at each rank. All CTAs wait for the peers' values. next: [warps][kMaxDevicePeers] in shared memory.
template <class IdAt>
__device__ __forceinline__ void read_slot_values(const ExchangeParams& q, int width, float* out, int (*next)[kMaxDevicePeers], const IdAt& id_at) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  begin_exchange_kernel();
  bool is_valid = header_of(call)->valid != 0;
  const bool waits = is_valid;
  const std::uint32_t ready = open_epoch(q, rank, kSignalValues);
  if (waits) {
    if (blockIdx.x == 0) post_signal(q, rank, kSignalValues, ready);
    is_valid = await_signal(q, rank, kSignalValues, ready);
    if (!is_valid) mark_lost(q, rank, call);
  }
  for (int t = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); t < call.T; t += static_cast<int>(gridDim.x) * (kRowThreads / 32)) {
    const auto* entries = handle_part<RowEntry>(call, shape.h_entries) + static_cast<std::int64_t>(t) * shape.D;
    for (int r = lane; r < shape.P; r += 32) next[warp][r] = shape.slot_budget;
    __syncwarp();
    for (int d = lane; is_valid && d < shape.D; d += 32) {
      const RowEntry entry = entries[d];
      if (entry.rank >= 0) next[warp][entry.rank] = entry.slot_begin;
    }
    __syncwarp();
    for (int k0 = 0; k0 < width; k0 += 32) {
      const std::int64_t place = static_cast<std::int64_t>(t) * width + k0 + lane;
      const int id = k0 + lane < width ? id_at(t, k0 + lane) : -1;
      const int at = is_valid && is_valid_id(id, shape.E) ? rank_of_id(shape, id) : -1;
      const unsigned same = __match_any_sync(ptx::kFullWarp, at), before = same & ptx::lanemask_lt();
      float value = 0.0f;
      int slot = 0;
      if (at >= 0) slot = next[warp][at] + __popc(before);
      __syncwarp();
      if (at >= 0 && before == 0) next[warp][at] = slot + __popc(same);
      if (at >= 0 && slot < shape.slot_budget) value = __ldcg(q.window<float>(at, shape.slot_values) + slot);
      if (k0 + lane < width) out[place] = value;
      __syncwarp();
    }
  }
  if (!waits || !last_cta(q, rank, kTicketValues)) return;
  close_epoch(q, rank, kSignalValues, ready);
  post_only(q, rank, kSignalValuesRead);
}

}  // namespace waybill::cuda
