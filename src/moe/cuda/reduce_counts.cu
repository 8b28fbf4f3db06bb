// SPDX-License-Identifier: Apache-2.0
// Counts of routes summed over the ranks of a group: each rank writes its own to every peer, waits for theirs, adds them up. Integers: any order.
//
// One CTA a rank of the launch (grid.y), all resident. Two parities of the window by the barrier's epoch: a rank may write the next step's counts while
// a slow one still adds up this one's. The barrier is that of CTA 131, which nothing else uses. A lost peer leaves the totals as they were; the exchange,
// which is poisoned too, says so.
#include "fabric/cuda_local/device_barrier.cuh"
#include "moe/cuda/reduce_counts.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBarrier = kMaxBarrierCtas - 1;
constexpr int kPhase = 200;

__global__ void __launch_bounds__(kThreads) moe_reduce_counts(const __grid_constant__ ReduceCountsArgs args) {
  const ReduceCountsArgs::Rank& own = args.rank[blockIdx.y];
  DevPeers p = args.ranks.table;
  p.rank = args.ranks.rank[blockIdx.y];
  const std::int64_t n = args.n, parity = p.control(p.rank)->epoch[kBarrier] & 1u;
  for (int peer = 0; peer < p.size; ++peer) {
    auto* to = p.at<std::int32_t>(peer, args.window) + (parity * p.size + p.rank) * n;
    for (int i = static_cast<int>(threadIdx.x); i < args.n; i += kThreads) to[i] = own.counts[i];
  }
  if (!device_barrier(p, kBarrier, kPhase)) return;
  const auto* from = p.at<std::int32_t>(p.rank, args.window) + parity * p.size * n;
  for (int i = static_cast<int>(threadIdx.x); i < args.n; i += kThreads) {
    std::int32_t sum = 0;
    for (int peer = 0; peer < p.size; ++peer) sum += __ldcg(from + peer * n + i);
    own.totals[i] = sum;
    const int e = i - args.first;
    if (own.global != nullptr && e >= 0 && e < args.E) own.global[e] = sum + (own.accumulated != nullptr ? own.accumulated[e] : 0);
  }
}

}  // namespace

void launch_reduce_counts(const ReduceCountsArgs& args, cudaStream_t stream) {
  moe_reduce_counts<<<dim3(1, static_cast<unsigned>(args.ranks.count)), kThreads, 0, stream>>>(args);
}

}  // namespace waybill::cuda
