// SPDX-License-Identifier: Apache-2.0
// Per-slot scalars back to their routes: d_weights[t, k] is read from the rank of its expert.
//
// Grid (ctas, ranks), 512 threads, a warp a token; all CTAs wait for the peers' values, so the launch must be resident. a: ids [T, K],
// c: d_weights [T, K] f32, 0 where there is no route (and everywhere on an invalid handle). Bytes over the links: 4 a slot.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {
namespace {

template <class Id>
__global__ void __launch_bounds__(kRowThreads, 2) exchange_slot_values_return(const __grid_constant__ ExchangeParams q) {
  __shared__ int next[kRowThreads / 32][kMaxDevicePeers];  // next slot of the token at each rank
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
  const auto* ids = static_cast<const Id*>(call.a);
  for (int t = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); t < call.T; t += static_cast<int>(gridDim.x) * (kRowThreads / 32)) {
    const auto* entries = handle_part<RowEntry>(call, shape.h_entries) + static_cast<std::int64_t>(t) * shape.D;
    for (int r = lane; r < shape.P; r += 32) next[warp][r] = shape.slot_budget;
    __syncwarp();
    for (int d = lane; is_valid && d < shape.D; d += 32) {
      const RowEntry entry = entries[d];
      if (entry.rank >= 0) next[warp][entry.rank] = entry.slot_begin;
    }
    __syncwarp();
    for (int k0 = 0; k0 < shape.K; k0 += 32) {
      const std::int64_t place = static_cast<std::int64_t>(t) * shape.K + k0 + lane;
      const int id = k0 + lane < shape.K ? ids[place] : -1;
      const int at = is_valid && is_valid_id(id, shape.E) ? rank_of_id(shape, id) : -1;
      const unsigned same = __match_any_sync(ptx::kFullWarp, at), before = same & ptx::lanemask_lt();
      float value = 0.0f;
      int slot = 0;
      if (at >= 0) slot = next[warp][at] + __popc(before);
      __syncwarp();
      if (at >= 0 && before == 0) next[warp][at] = slot + __popc(same);
      if (at >= 0 && slot < shape.slot_budget) value = __ldcg(q.window<float>(at, shape.slot_values) + slot);
      if (k0 + lane < shape.K) static_cast<float*>(call.c)[place] = value;
      __syncwarp();
    }
  }
  if (!waits || !last_cta(q, rank, kTicketValues)) return;
  close_epoch(q, rank, kSignalValues, ready);
  post_only(q, rank, kSignalValuesRead);
}

}  // namespace

const void* slot_values_return_kernel(int id_bytes) {
  return id_bytes == 2 ? reinterpret_cast<const void*>(&exchange_slot_values_return<std::int16_t>)
                       : reinterpret_cast<const void*>(&exchange_slot_values_return<std::int32_t>);
}

void launch_slot_values_return(const ExchangeParams& q, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(q.shape.id_bytes == 2 ? exchange_slot_values_return<std::int16_t> : exchange_slot_values_return<std::int32_t>, ctas, kRowThreads, 0, overlap,
               stream, q);
}

}  // namespace waybill::cuda
