// SPDX-License-Identifier: Apache-2.0
// A barrier of all ranks as a kernel of its own. Grid: (CTAs, ranks on this device), 96 threads (one a peer).
#include <algorithm>
#include <cstring>

#include "fabric/cuda_local/cuda_local_kernels.h"
#include "fabric/cuda_local/device_barrier.cuh"

namespace waybill::cuda {
namespace {

__global__ void group_barrier(const __grid_constant__ LocalRanks ranks, int phase) {
  (void)device_barrier(ranks.of(static_cast<int>(blockIdx.y)), static_cast<int>(blockIdx.x), phase);
}

}  // namespace

const void* group_barrier_kernel() { return reinterpret_cast<const void*>(&group_barrier); }

void launch_group_barrier_kernel(const LocalRanks& ranks, int phase, int ctas, cudaStream_t stream) {
  group_barrier<<<dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(ranks.count)), kBarrierThreads, 0, stream>>>(ranks, phase);
}

}  // namespace waybill::cuda
