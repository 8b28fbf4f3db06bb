// SPDX-License-Identifier: Apache-2.0
// Column sums of bf16 gradients, group by group, whose rows are multiples of 16 bytes: the order of sums of the portable kernel (gemm_portable.cu), the same
// bits, with rows read in strips of 512 bytes. Grid (256 columns, groups), 32 x 16 threads: a thread has eight columns, a line every 16th row; the lines' sums
// are added in order. Bytes: 2 rows n.
#include "ops/gemm/cuda/gemm_portable.h"
#include "ops/gemm/cuda/strip_sums.cuh"

namespace waybill::cuda {
namespace {

constexpr int kLines = kStripLines, kColumns = kStripColumns;

__global__ void __launch_bounds__(32 * kLines) bias_grad_bf16(const BiasGrad p) {
  __shared__ float part[kLines][kStripWidth];
  const int group = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kStripWidth, column = first + kColumns * lane;
  const std::int64_t begin = min(max(static_cast<std::int64_t>(p.offsets[group]), std::int64_t{0}), p.num_rows);
  const std::int64_t end = min(max(static_cast<std::int64_t>(p.offsets[group + 1]), begin), p.num_rows);
  float sum[kColumns] = {};
  if (column < p.n) {
#pragma unroll 4
    for (std::int64_t s = begin + line; s < end; s += kLines) {
      const bool is_row = p.rows == nullptr || (p.rows[s] >= 0 && p.rows[s] < p.list_rows);
      uint4 row{0, 0, 0, 0};
      if (is_row) row = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.dy) + s * p.n + column);
      const unsigned words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[2 * i] += __uint_as_float(words[i] << 16), sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  add_up_lines(sum, part, first, p.n, p.d_bias + group * p.n, p.accumulate);
}

}  // namespace

bool takes_bias_grad_bf16(const BiasGrad& p) { return p.is_bf16 && p.n % kColumns == 0 && reinterpret_cast<std::uintptr_t>(p.dy) % 16 == 0; }

void launch_bias_grad_bf16(const BiasGrad& p, cudaStream_t stream) {
  const auto strips = static_cast<unsigned>((p.n + kStripWidth - 1) / kStripWidth);
  bias_grad_bf16<<<dim3(strips, static_cast<unsigned>(p.groups)), dim3(32, kLines), 0, stream>>>(p);
}

}  // namespace waybill::cuda
