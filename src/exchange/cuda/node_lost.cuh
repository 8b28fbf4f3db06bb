// SPDX-License-Identifier: Apache-2.0
// What kernels behind the rail do once the group is given up (NcclWorld): messages were cut off, and replays of a graph, which no host call refuses, find
// those of an earlier step in place of new ones.
#pragma once

#include "core/cuda/ptx.cuh"
#include "exchange/cuda/node_kernels.h"

namespace waybill::cuda {

inline constexpr int kRailPhase = 200;

__device__ __forceinline__ bool is_given_up(const NodeArgs& args) { return ptx::ld_acquire_sys(args.poison) != 0; }

// One thread. The device does not know which rank is lost: -1.
__device__ __forceinline__ void mark_given_up(const NodeArgs& args, HandleHeader* header) {
  header->valid = header->R = header->S = header->S_padded = 0;
  if ((atomicOr(&args.status->flags, static_cast<std::uint32_t>(kStatusTimeout)) & kStatusTimeout) != 0) return;
  args.status->timeout_rank = args.status->timeout_peer = -1, args.status->timeout_phase = kRailPhase;
}

}  // namespace waybill::cuda
