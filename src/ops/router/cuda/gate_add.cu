// SPDX-License-Identifier: Apache-2.0
#include "ops/router/cuda/gate_split.h"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(256) gate_add(const float* parts, float* sum, std::size_t count, bool accumulate) {
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * 256 + threadIdx.x; i < count; i += static_cast<std::size_t>(gridDim.x) * 256) {
    const float value = parts[i] + parts[count + i];
    sum[i] = accumulate ? sum[i] + value : value;
  }
}

}  // namespace

void launch_gate_add(const float* parts, float* sum, std::size_t count, bool accumulate, cudaStream_t stream) {
  gate_add<<<528, 256, 0, stream>>>(parts, sum, count, accumulate);
}

}  // namespace waybill::cuda
