// SPDX-License-Identifier: Apache-2.0
// Four lanes a row, blocks in the order of core/cuda/activation_math.cuh. Bytes: parts once, 4 a row.
#include "core/cuda/activation_math.cuh"
#include "ops/gemm/cuda/grouped_weight_sum.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) weight_sum(const WeightSum p) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, row = thread / 4;
  const std::int64_t rows = min(static_cast<std::int64_t>(__ldg(p.num_rows)), p.rows);
  float sum = 0.0f;
  if (row < rows) {
    for (std::int64_t block = thread % 4; block < p.blocks; block += 4) sum += p.parts[row * p.blocks + block];
  }
  sum = sum_of_4_lanes(sum);
  if (row < rows && thread % 4 == 0) p.d_weight[row] = sum;
}

}  // namespace

void launch_weight_sum(const WeightSum& sum, cudaStream_t stream) {
  const std::int64_t blocks = (4 * sum.rows + kThreads - 1) / kThreads;
  if (blocks > 0) weight_sum<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sum);
}

}  // namespace waybill::cuda
