// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda_local/local_ranks.h"

#include <set>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

LocalRanks local_ranks(const CudaLocalGroup& group, int device) {
  LocalRanks ranks{};
  ranks.table = group.peers(0);
  for (const int rank : group.ranks_on(device)) ranks.rank[ranks.count++] = static_cast<std::int16_t>(rank);
  return ranks;
}

void launch_group_barrier(const CudaLocalGroup& group, int phase, int ctas, std::span<const cudaStream_t> streams) {
  WB_CHECK(ctas >= 1 && ctas <= kMaxBarrierCtas, "a barrier has 1 to {} CTAs a rank, got {}", kMaxBarrierCtas, ctas);
  group.check_co_residency(group_barrier_kernel(), kBarrierThreads, 0, ctas);
  std::set<int> devices;
  for (int rank = 0; rank < group.size(); ++rank) devices.insert(group.device_of(rank));
  WB_CHECK(streams.size() == devices.size(), "the group spans {} devices, got {} streams", devices.size(), streams.size());
  std::size_t index = 0;
  for (const int device : devices) {
    const DeviceGuard guard(device);
    launch_group_barrier_kernel(local_ranks(group, device), phase, ctas, streams[index++]);
    check_launch("group_barrier");
  }
}

}  // namespace waybill::cuda
