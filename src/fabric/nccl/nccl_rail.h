// SPDX-License-Identifier: Apache-2.0
// Rails over NCCL's send and receive. All messages of a call are one group, so that they move together; they can be captured in a graph, which
// must be destroyed before the communicator.
#pragma once

#include <memory>

#include "fabric/cuda_local/rail.h"
#include "fabric/nccl/nccl_library.h"

namespace waybill::cuda {

// comm: of all ranks, node by node; must outlive the rail. Null once the group is given up: calls are refused then (kPeerFailed).
std::unique_ptr<Rail> make_nccl_rail(const ncclComm_t& comm, int rank, int ranks_per_node, int size);

}  // namespace waybill::cuda
