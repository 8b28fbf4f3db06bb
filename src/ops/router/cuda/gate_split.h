// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace waybill::cuda {

// high[i] = bf16(value[i]), low[i] = bf16(value[i] - high[i]).
void launch_gate_split(const float* value, void* high, void* low, std::size_t count, cudaStream_t stream);

}  // namespace waybill::cuda
