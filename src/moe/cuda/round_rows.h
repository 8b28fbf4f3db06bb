// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// out [count] = from, rounded to bf16 where out_is_bf16. count a multiple of 8; 16-byte aligned.
void launch_round_rows(const float* from, void* out, std::int64_t count, bool out_is_bf16, cudaStream_t stream);

}  // namespace waybill::cuda
