// SPDX-License-Identifier: Apache-2.0
// Launches of persistent clusters of CTAs, and the scratch that they share on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/cuda/work_room.h"

namespace waybill::cuda {

struct GroupedLaunch {
  const void* kernel;  // of one parameter
  int cluster;         // CTAs
  std::size_t shared_bytes;
  int block_n;  // for messages
  int threads = 384;
};

// Clusters that are resident at once; prepares the kernel on the device the first time.
int resident_clusters(const GroupedLaunch& launch, int device);

// overlap: may start while its predecessor on the stream ends (programmatic dependent launch).
void launch_grouped(const GroupedLaunch& launch, int num_clusters, bool overlap, cudaStream_t stream, void* params);

// Scratch of one (device, stream): calls on a stream run in order and share it. Counters are zero between launches.
// partials lie in the stream's work room.
struct GroupedScratch {
  const ScratchBuffer &ticket, &arrivals, &partials;
};
// Room for `tiles` partial tiles of tile_floats.
GroupedScratch grouped_scratch(int device, cudaStream_t stream, std::size_t tiles, std::size_t tile_floats);

}  // namespace waybill::cuda
