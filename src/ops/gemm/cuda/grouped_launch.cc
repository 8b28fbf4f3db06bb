// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_launch.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "core/cuda/stream_map.h"

namespace waybill::cuda {
namespace {

struct LaunchRoom {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
};

void fill_config(LaunchRoom& room, const GroupedLaunch& launch, int num_clusters, bool overlap, cudaStream_t stream) {
  room.attributes[0].id = cudaLaunchAttributeClusterDimension;
  room.attributes[0].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  room.attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  room.attributes[1].val.programmaticStreamSerializationAllowed = 1;
  room.config.gridDim = dim3(static_cast<unsigned>(num_clusters * launch.cluster));
  room.config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  room.config.dynamicSmemBytes = launch.shared_bytes;
  room.config.stream = stream;
  room.config.attrs = room.attributes;
  room.config.numAttrs = overlap ? 2 : 1;
}

}  // namespace

// No lock is held while the driver is asked: it loads the kernel at the first question, which may wait for what runs on this device, and that for the thread of
// another device which comes here, too.
int resident_clusters(const GroupedLaunch& launch, int device) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find({device, launch.kernel});
    if (found != known.end()) return found->second;
  }
  WB_TRY_CUDA(cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch.shared_bytes)));
  LaunchRoom room;
  fill_config(room, launch, 1, false, nullptr);
  int clusters = 0;
  WB_TRY_CUDA(cudaOccupancyMaxActiveClusters(&clusters, launch.kernel, &room.config));
  if (clusters < 1) {
    WB_FAIL(ErrorCode::kUnsupported, "cuda:{} cannot hold a grouped matmul tile of 128 x {} in clusters of {} ({} bytes of shared memory)", device,
            launch.block_n, launch.cluster, launch.shared_bytes);
  }
  const std::lock_guard lock(mutex);
  known[{device, launch.kernel}] = clusters;
  return clusters;
}

void launch_grouped(const GroupedLaunch& launch, int num_clusters, bool overlap, cudaStream_t stream, void* params) {
  LaunchRoom room;
  fill_config(room, launch, num_clusters, overlap, stream);
  void* arguments[] = {params};
  WB_TRY_CUDA(cudaLaunchKernelExC(&room.config, launch.kernel, arguments));
}

GroupedScratch grouped_scratch(int device, cudaStream_t stream, std::size_t tiles, std::size_t tile_floats) {
  struct Counters {
    ScratchBuffer ticket, arrivals;
  };
  static StreamMap<Counters> all;
  Counters& counters = all.at(device, stream);
  counters.ticket.reserve(sizeof(std::uint32_t), true, device, stream);
  counters.arrivals.reserve(tiles * 2 * sizeof(std::uint32_t), true, device, stream);
  ScratchBuffer& room = work_room(device, stream);
  room.reserve(tiles * tile_floats * sizeof(float), false, device, stream);
  return {counters.ticket, counters.arrivals, room};
}

}  // namespace waybill::cuda
