// SPDX-License-Identifier: Apache-2.0
// Rails over NCCL's send and receive. All messages of a call are one group, so that they move together; they can be captured in a graph, which
// must be destroyed before the communicator.
#pragma once

#include <functional>
#include <memory>

#include "fabric/cuda_local/rail.h"
#include "fabric/nccl/nccl_comm.h"
#include "fabric/nccl/nccl_library.h"
#include "fabric/nccl/nccl_watch.h"

namespace waybill::cuda {

// Called where NCCL refuses a message, or the communicator has been taken away; throws. What the stream holds may wait for a rank that is gone.
using RailFailure = std::function<void(cudaStream_t stream, ncclResult_t error)>;

// nccl and comm must outlive the rail. comm: of all ranks, node by node. progress: counts of what the device has come to (nccl_watch.h), or null.
// poison: device memory, set behind messages once *progress says that the group is given up.
std::unique_ptr<Rail> make_nccl_rail(const NcclLibrary& nccl, const NcclComm& comm, int rank, int ranks_per_node, int size, RailProgress* progress,
                                     std::uint32_t* poison, RailFailure failed);

}  // namespace waybill::cuda
