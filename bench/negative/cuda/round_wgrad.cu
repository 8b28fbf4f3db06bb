// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include "bench/negative/cuda/unordered_wgrad.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 132 * 8;

__global__ void __launch_bounds__(kThreads, 8) round_wgrad(const float4* sums, uint2* d, std::int64_t count) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const float4 v = __ldcs(sums + i);
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    __stcs(d + i, make_uint2(reinterpret_cast<const unsigned&>(low), reinterpret_cast<const unsigned&>(high)));
  }
}

}  // namespace

void launch_round_wgrad(const float* sums, void* d, std::int64_t count, cudaStream_t stream) {
  round_wgrad<<<kCtas, kThreads, 0, stream>>>(reinterpret_cast<const float4*>(sums), static_cast<uint2*>(d), count / 4);
}

}  // namespace waybill::cuda
