// SPDX-License-Identifier: Apache-2.0
// The second bias on the second matmul's result. A warp a slot; its expert by bisection of the offsets. Bytes: 2 S W read and written.
#include "exchange/cuda/row_vectors.cuh"
#include "moe/cuda/second_bias.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) moe_second_bias_add(const SecondBias a, const float* b2, __nv_bfloat16* y) {
  using V = Vector<__nv_bfloat16>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t S = min(static_cast<std::int64_t>(a.offsets[a.L]), a.num_slots);
  for (std::int64_t s = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; s < S; s += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const float weight = a.weight[s];
    if (weight == 0.0f) continue;      // padding
    std::int64_t low = 0, high = a.L;  // offsets[low] <= s < offsets[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (a.offsets[middle] <= s ? low : high) = middle;
    }
    for (std::int64_t column = 8 * lane; column < a.W; column += 256) {
      auto* at = reinterpret_cast<uint4*>(y + s * a.W + column);
      const auto* bias = reinterpret_cast<const float4*>(b2 + low * a.W + column);
      float values[8];
      V::to_float(*at, values);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 b = bias[i];
        values[4 * i] = fmaf(weight, b.x, values[4 * i]), values[4 * i + 1] = fmaf(weight, b.y, values[4 * i + 1]);
        values[4 * i + 2] = fmaf(weight, b.z, values[4 * i + 2]), values[4 * i + 3] = fmaf(weight, b.w, values[4 * i + 3]);
      }
      *at = V::from_float(values);
    }
  }
}

}  // namespace

void launch_second_bias_add(const SecondBias& a, const float* b2, void* y, cudaStream_t stream) {
  if (a.L == 0 || a.num_slots == 0) return;
  const std::int64_t ctas = (a.num_slots + kWarps - 1) / kWarps;
  moe_second_bias_add<<<static_cast<unsigned>(ctas < 2112 ? ctas : 2112), kThreads, 0, stream>>>(a, b2, static_cast<__nv_bfloat16*>(y));
}

}  // namespace waybill::cuda
