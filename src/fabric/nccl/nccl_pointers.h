// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace waybill::cuda {

// table [num_ranks] in device memory: offset 0 of the window on each rank.
void launch_window_pointers(ncclWindow_t window, int num_ranks, void** table, cudaStream_t stream);

}  // namespace waybill::cuda
