// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fabric/cuda_local/cuda_local_kernels.h"

namespace waybill::cuda {

// totals [n] = sum over the ranks of the node of counts [n] (those of several nodes: sum_nodes.h); global [E] = totals [first, first + E) + accumulated [E],
// where given.
struct ReduceCountsArgs {
  LocalRanks ranks;
  std::uint64_t window;  // [2 parities][ranks of the node][n] i32
  std::int32_t n, E, first;
  struct Rank {
    const std::int32_t* counts;
    const std::int32_t* accumulated;  // or null: 0
    std::int32_t* totals;
    std::int32_t* global;  // or null
  } rank[kMaxDevicePeers];
};
void launch_reduce_counts(const ReduceCountsArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
