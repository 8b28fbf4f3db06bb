// SPDX-License-Identifier: Apache-2.0
// Memory that the operations of a stream use one after the other: workspaces, partial tiles, operands made on the way. None of it lives past the call that
// queued its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/scratch_buffer.h"

namespace waybill::cuda {

// One a (device, stream), kept for the process. A call reserves all that it will use before its first kernel (a later, larger reserve() moves the room), and
// parts that live together side by side: what it calls in between takes the room from its start (dense_matmul(): kDenseWorkspaceBytes).
ScratchBuffer& work_room(int device, cudaStream_t stream);

}  // namespace waybill::cuda
