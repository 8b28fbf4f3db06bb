// SPDX-License-Identifier: Apache-2.0
#include "cuda/fabric_kernels.h"
#include "fabric/cuda_local/device_barrier.cuh"

namespace waybill::cuda {
namespace {

__global__ void stamp_exchange(const __grid_constant__ LocalRanks ranks, std::uint64_t window, std::uint64_t errors, int round_key, int late_rank) {
  const DevPeers p = ranks.of(static_cast<int>(blockIdx.y));
  const int cta = static_cast<int>(blockIdx.x);
  if (p.rank == late_rank) return;
  // The epoch makes stamps differ between replays of a graph.
  const std::uint32_t stamp = p.control(p.rank)->epoch[cta] * 4096u + static_cast<std::uint32_t>(round_key);
  __syncthreads();
  for (int peer = static_cast<int>(threadIdx.x); peer < p.size; peer += static_cast<int>(blockDim.x)) {
    p.at<std::uint32_t>(peer, window)[cta * kMaxDevicePeers + p.rank] = stamp + static_cast<std::uint32_t>(p.rank);
  }
  if (!device_barrier(p, cta, 7)) return;
  for (int peer = static_cast<int>(threadIdx.x); peer < p.size; peer += static_cast<int>(blockDim.x)) {
    const std::uint32_t got = p.at<std::uint32_t>(p.rank, window)[cta * kMaxDevicePeers + peer];
    if (got != stamp + static_cast<std::uint32_t>(peer)) atomicAdd(p.at<int>(p.rank, errors), 1);
  }
  (void)device_barrier(p, cta, 8);
}

}  // namespace

void launch_stamp_exchange(const LocalRanks& ranks, std::uint64_t window, std::uint64_t errors, int ctas, int round_key, int late_rank, cudaStream_t stream) {
  stamp_exchange<<<dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(ranks.count)), 128, 0, stream>>>(ranks, window, errors, round_key, late_rank);
}

}  // namespace waybill::cuda
