// SPDX-License-Identifier: Apache-2.0
// Column sums of weighted gradients, expert by expert. Grid (64 columns, experts), 32 x 16 threads: a thread has two columns, a line every 16th slot;
// the lines' sums are added in order. Bytes: 2 S W read.
#include <cuda_bf16.h>

#include "moe/cuda/second_bias.h"

namespace waybill::cuda {
namespace {

constexpr int kLines = 16;

__global__ void __launch_bounds__(32 * kLines) moe_second_bias_sums(const SecondBias a, float* d_b2, const bool accumulate) {
  __shared__ float2 part[kLines][33];
  const int expert = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 64 + 2 * lane;
  const std::int64_t begin = min(static_cast<std::int64_t>(a.offsets[expert]), a.num_slots),
                     end = min(static_cast<std::int64_t>(a.offsets[expert + 1]), a.num_slots);
  float2 sum{0, 0};
  if (column < a.W) {
#pragma unroll 4
    for (std::int64_t s = begin + line; s < end; s += kLines) {
      const std::int64_t row = a.rows == nullptr ? s : a.rows[s];
      if (a.rows != nullptr && (row < 0 || row >= a.list_rows)) continue;
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(a.dy) + row * a.W + column));
      const float weight = a.weight[s];
      sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
    }
  }
  part[line][lane] = sum;
  __syncthreads();
  if (line != 0 || column >= a.W) return;
  for (int l = 1; l < kLines; ++l) sum.x += part[l][lane].x, sum.y += part[l][lane].y;
  float2& out = *reinterpret_cast<float2*>(d_b2 + expert * a.W + column);
  out = accumulate ? make_float2(out.x + sum.x, out.y + sum.y) : sum;
}

}  // namespace

void launch_second_bias_sums(const SecondBias& a, float* d_b2, bool accumulate, cudaStream_t stream) {
  if (a.L == 0) return;
  moe_second_bias_sums<<<dim3(static_cast<unsigned>((a.W + 63) / 64), static_cast<unsigned>(a.L)), dim3(32, kLines), 0, stream>>>(a, d_b2, accumulate);
}

}  // namespace waybill::cuda
