// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// out[i] = a[i] + b[i], fp32 rounded once to bf16 where out_is_bf16. count a multiple of 8; 16-byte aligned.
struct SumRowsArgs {
  const float* a;
  const float* b;
  void* out;
  std::int64_t count;
  bool out_is_bf16;
};
void launch_sum_rows(const SumRowsArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
