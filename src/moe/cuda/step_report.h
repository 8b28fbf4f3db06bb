// SPDX-License-Identifier: Apache-2.0
// Small kernels of the layer, one a file.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/cuda/exchange_params.h"
#include "moe/cuda/device_moe_report.h"

namespace waybill::cuda {

struct StepReportArgs {
  const HandleHeader* header;
  const std::int32_t* expert_counts;  // [L]
  std::int32_t L;
  std::int32_t is_global;       // losses[0] is the global loss
  const double* losses;         // [3] aux, sequence, z; or null
  const double* global_losses;  // [1] the global loss beside an aux loss; or null
  const std::int32_t* dropped;  // [1] or null
  std::uint32_t dense_map_reasons;
  DeviceMoeReport* report;            // page-locked host memory
  const unsigned long long* wait_ns;  // [P]
  std::int32_t P;
};
void launch_step_report(const StepReportArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
