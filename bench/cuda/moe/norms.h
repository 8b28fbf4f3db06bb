// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda::moe_bench {

// sums[0] += sum (a - b)^2, sums[1] += sum b^2 over [rows, columns]; places: see relative_difference().
void launch_norms(const void* a, bool a_is_bf16, const void* b, bool b_is_bf16, std::int64_t rows, std::int64_t columns, const std::int32_t* places,
                  std::int64_t K, double* sums, cudaStream_t stream);

}  // namespace waybill::cuda::moe_bench
