// SPDX-License-Identifier: Apache-2.0
// fp32 -> two bf16 terms, elementwise. Bytes: 8 an element.
#include <cuda_bf16.h>

#include "ops/router/cuda/gate_split.h"

namespace waybill::cuda {
namespace {

__global__ void gate_split(const float* value, __nv_bfloat16* high, __nv_bfloat16* low, std::size_t count) {
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    const float v = value[i];
    const __nv_bfloat16 h = __float2bfloat16(v);
    high[i] = h;
    low[i] = __float2bfloat16(v - __bfloat162float(h));
  }
}

}  // namespace

void launch_gate_split(const float* value, void* high, void* low, std::size_t count, cudaStream_t stream) {
  gate_split<<<1056, 256, 0, stream>>>(value, static_cast<__nv_bfloat16*>(high), static_cast<__nv_bfloat16*>(low), count);
}

}  // namespace waybill::cuda
