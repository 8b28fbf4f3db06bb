// SPDX-License-Identifier: Apache-2.0
// How an invalid step is kept from the parts of the layer that do not go through the exchange.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/cuda/exchange_params.h"

namespace waybill::cuda {

// offsets [2] = {0, T of a valid step, else 0}.
void launch_step_rows(const HandleHeader* header, std::int32_t T, std::int32_t* offsets, cudaStream_t stream);

// values [count] = 0 where the step is not valid.
void launch_clear_invalid(const HandleHeader* header, float* values, std::int64_t count, cudaStream_t stream);

// values [count] += more.
void launch_add_values(float* values, const float* more, std::int64_t count, cudaStream_t stream);

}  // namespace waybill::cuda
