// SPDX-License-Identifier: Apache-2.0
// Processes of one machine that NCCL takes for several.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "cuda/processes.h"

namespace waybill::cuda {

#define WB_NEEDS_TWO_NCCL_GPUS()                                                         \
  if (static const int gpus = gpus_for_nccl(); gpus < 2) {                               \
    GTEST_SKIP() << "needs 2 GPUs and NCCL " << NCCL_VERSION_CODE << ", found " << gpus; \
  } else                                                                                 \
    (void)0

// Two processes on one GPU that NCCL takes for two nodes: sockets between them.
inline void play_two_nodes(int rank) {
  ::setenv("NCCL_HOSTID", rank == 0 ? "first" : "second", 1), ::setenv("NCCL_SOCKET_IFNAME", "lo", 1), ::setenv("LOCAL_RANK", "0", 1);
}

// Nodes of `per_node` ranks that NCCL takes for separate machines, one GPU a rank of a node: sockets between them, windows inside.
inline void play_node(int rank, int per_node) {
  ::setenv("NCCL_HOSTID", fmt::format("node {}", rank / per_node).c_str(), 1), ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("LOCAL_RANK", std::to_string(rank % per_node).c_str(), 1);
}

}  // namespace waybill::cuda
