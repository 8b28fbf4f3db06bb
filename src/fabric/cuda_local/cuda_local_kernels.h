// SPDX-License-Identifier: Apache-2.0
// The ranks that one launch on one device stands for (grid.y = local rank), and the barrier kernel's launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda {

inline constexpr int kBarrierThreads = 96;

// One table for all local ranks: they differ in `rank` only.
struct LocalRanks {
  DevPeers table;
  std::int32_t count;
  std::int16_t rank[kMaxDevicePeers];

#if defined(__CUDACC__)
  __device__ __forceinline__ DevPeers of(int local) const {
    DevPeers p = table;
    p.rank = rank[local];
    return p;
  }
#endif
};

const void* group_barrier_kernel();
void launch_group_barrier_kernel(const LocalRanks& ranks, int phase, int ctas, cudaStream_t stream);

}  // namespace waybill::cuda
