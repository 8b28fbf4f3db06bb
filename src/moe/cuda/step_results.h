// SPDX-License-Identifier: Apache-2.0
// What a forward found as arrays of a framework.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/cuda/device_moe_report.h"

namespace waybill::cuda {

struct StepResultsArgs {
  const DeviceMoeReport* report;  // page-locked host memory, written by moe_step_report before
  const std::int32_t* counts;     // [E]
  std::int32_t E;
  std::int32_t slot_capacity;
  std::int64_t row_capacity;
  std::int32_t* out_counts;  // [E] or null
  float* losses;             // [4] aux, sequence, global, z; or null
  std::int32_t* status;      // [6] valid, slot demand, slot capacity, rows, slots, flags (of an overflow, or kStatusTimeout: a rank was lost); or null
};
void launch_step_results(const StepResultsArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
