// SPDX-License-Identifier: Apache-2.0
// Column sums of weighted gradients, expert by expert. Grid (256 columns, experts), 32 x 16 threads: a thread has eight columns, a line every 16th slot;
// the lines' sums are added in order. Bytes: 2 S W read.
#include <cuda_bf16.h>

#include "moe/cuda/second_bias.h"
#include "ops/gemm/cuda/strip_sums.cuh"

namespace waybill::cuda {
namespace {

constexpr int kLines = kStripLines, kColumns = kStripColumns;

__device__ __forceinline__ void add_row(float (&sum)[kColumns], const uint4& row, float weight) {
  const unsigned words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
  }
}

__global__ void __launch_bounds__(32 * kLines) moe_second_bias_sums(const SecondBias a, float* d_b2, const bool accumulate) {
  __shared__ float part[kLines][kStripWidth];
  const int expert = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kStripWidth, column = first + kColumns * lane;
  const std::int64_t begin = min(static_cast<std::int64_t>(a.offsets[expert]), a.num_slots),
                     end = min(static_cast<std::int64_t>(a.offsets[expert + 1]), a.num_slots);
  float sum[kColumns] = {};
  if (column < a.W) {  // W is a multiple of kColumns
#pragma unroll 4
    for (std::int64_t s = begin + line; s < end; s += kLines) {
      const std::int64_t row = a.rows == nullptr ? s : a.rows[s];
      if (a.rows != nullptr && (row < 0 || row >= a.list_rows)) continue;
      add_row(sum, *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.dy) + row * a.W + column), a.weight[s]);
    }
  }
  add_up_lines(sum, part, first, a.W, d_b2 + expert * a.W, accumulate);
}

}  // namespace

void launch_second_bias_sums(const SecondBias& a, float* d_b2, bool accumulate, cudaStream_t stream) {
  if (a.L == 0) return;
  const auto strips = static_cast<unsigned>((a.W + kStripWidth - 1) / kStripWidth);
  moe_second_bias_sums<<<dim3(strips, static_cast<unsigned>(a.L)), dim3(32, kLines), 0, stream>>>(a, d_b2, accumulate);
}

}  // namespace waybill::cuda
