// SPDX-License-Identifier: Apache-2.0
// What a dispatch found, as arrays of a framework.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/cuda/exchange_params.h"

namespace waybill::cuda {

// sizes [L] = the differences of offsets [L + 1], valid [1]; offsets {0, 2, 2, 5} -> sizes {2, 0, 3}. All 0 where the handle is invalid.
void launch_slot_sizes(const HandleHeader* header, const std::int32_t* offsets, std::int32_t L, std::int32_t* sizes, std::int32_t* valid, cudaStream_t stream);

}  // namespace waybill::cuda
