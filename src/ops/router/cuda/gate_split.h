// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace waybill::cuda {

// parts [T, 2E] bf16: columns e and E + e hold bf16(value) and bf16(value - bf16(value)) of value [T, E].
void launch_gate_split(const float* value, void* parts, std::int64_t T, std::int64_t E, cudaStream_t stream);

// sum [count] = (accumulate: sum +) parts [0, count) + parts [count, 2 count).
void launch_gate_add(const float* parts, float* sum, std::size_t count, bool accumulate, cudaStream_t stream);

}  // namespace waybill::cuda
