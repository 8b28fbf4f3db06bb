// SPDX-License-Identifier: Apache-2.0
// Adds up what the epilogue of an activation's gradient left for each row: one number for each block of 64 columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

struct WeightSum {
  const float* parts;            // [rows, blocks]
  const std::int32_t* num_rows;  // in device memory: rows from there on are left alone
  std::int64_t rows, blocks;
  float* d_weight;  // [rows]
};
void launch_weight_sum(const WeightSum& sum, cudaStream_t stream);

}  // namespace waybill::cuda
