// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// out [rows, H] = a + b, fp32, rounded once to bf16 where out_is_bf16. a may be null. b_rows: where the device holds how many rows b has (0 behind them);
// null: all. H a multiple of 8; everything contiguous and 16-byte aligned.
struct SumRowsArgs {
  const float* a;
  const float* b;
  const std::int32_t* b_rows;
  void* out;
  std::int64_t rows, H;
  bool out_is_bf16;
};
void launch_sum_rows(const SumRowsArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
