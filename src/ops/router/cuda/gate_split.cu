// SPDX-License-Identifier: Apache-2.0
// fp32 -> two bf16 terms side by side. Grid: rows; bytes: 8 an element.
#include <cuda_bf16.h>

#include "ops/router/cuda/gate_split.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) gate_split(const float* value, __nv_bfloat16* parts, std::int64_t T, std::int64_t E) {
  // A warp a row, or several rows where they are short.
  const std::int64_t rows_a_step = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32), lane = threadIdx.x & 31;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; t < T; t += rows_a_step) {
    for (std::int64_t e = lane; e < E; e += 32) {
      const float v = __ldcs(value + t * E + e);
      const __nv_bfloat16 high = __float2bfloat16(v);
      parts[t * 2 * E + e] = high;
      parts[t * 2 * E + E + e] = __float2bfloat16(v - __bfloat162float(high));
    }
  }
}

}  // namespace

void launch_gate_split(const float* value, void* parts, std::int64_t T, std::int64_t E, cudaStream_t stream) {
  gate_split<<<1056, kThreads, 0, stream>>>(value, static_cast<__nv_bfloat16*>(parts), T, E);
}

}  // namespace waybill::cuda
