// SPDX-License-Identifier: Apache-2.0
// What the routing weights get from the second bias. A warp a slot; its expert by bisection of the offsets. Bytes: 2 S W read, and b2 from the L2.
#include <cuda_bf16.h>

#include "core/cuda/ptx.cuh"
#include "moe/cuda/second_bias.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) moe_second_bias_dots(const SecondBias a, const float* b2, float* d_weight) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t S = min(static_cast<std::int64_t>(a.offsets[a.L]), a.num_slots);
  for (std::int64_t s = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; s < S; s += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t row = a.rows == nullptr ? s : a.rows[s];
    if (a.rows != nullptr && (row < 0 || row >= a.list_rows)) continue;
    std::int64_t low = 0, high = a.L;  // offsets[low] <= s < offsets[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (a.offsets[middle] <= s ? low : high) = middle;
    }
    const auto* dy = static_cast<const __nv_bfloat16*>(a.dy) + row * a.W;
    const float* bias = b2 + low * a.W;
    float dot = 0;
    for (std::int64_t column = 2 * lane; column < a.W; column += 64) {
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(dy + column));
      const float2 b = *reinterpret_cast<const float2*>(bias + column);
      dot = fmaf(v.y, b.y, fmaf(v.x, b.x, dot));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(ptx::kFullWarp, dot, d);
    if (lane == 0) d_weight[s] += dot;
  }
}

}  // namespace

void launch_second_bias_dots(const SecondBias& a, const float* b2, float* d_weight, cudaStream_t stream) {
  if (a.L == 0 || a.num_slots == 0) return;
  const std::int64_t ctas = (a.num_slots + kWarps - 1) / kWarps;
  moe_second_bias_dots<<<static_cast<unsigned>(ctas < 2112 ? ctas : 2112), kThreads, 0, stream>>>(a, b2, d_weight);
}

}  // namespace waybill::cuda
