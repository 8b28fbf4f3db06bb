// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// Queues ++*count, and *poison = 1 where *is_lost is not 0. count, is_lost (or null): in pinned host memory, the count of kernels of one device only. Can be
// captured.
void launch_nccl_progress(std::uint32_t* count, cudaStream_t stream, const std::uint32_t* is_lost = nullptr, std::uint32_t* poison = nullptr);

}  // namespace waybill::cuda
