// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fabric/cuda_local/cuda_local.h"
#include "fabric/cuda_local/cuda_local_kernels.h"

namespace waybill::cuda {

// The group's ranks on `device`, for one launch with grid.y = count.
LocalRanks local_ranks(const CudaLocalGroup& group, int device);

}  // namespace waybill::cuda
