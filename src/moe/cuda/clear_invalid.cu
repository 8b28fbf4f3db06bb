// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/num_sms.h"
#include "moe/cuda/step_rows.h"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(256) moe_clear_invalid(const HandleHeader* header, float* values, std::int64_t count) {
  if (header->valid != 0) return;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * 256) values[i] = 0;
}

}  // namespace

void launch_clear_invalid(const HandleHeader* header, float* values, std::int64_t count, cudaStream_t stream) {
  moe_clear_invalid<<<static_cast<unsigned>(num_sms()), 256, 0, stream>>>(header, values, count);
}

}  // namespace waybill::cuda
