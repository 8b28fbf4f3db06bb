// SPDX-License-Identifier: Apache-2.0
// d_weight [rows] f32 from partial sums over 64 columns each, in the order of core/cuda/activation_math.cuh: those at b % 4 added up in order, then
// (0 + 1) + (2 + 3). A thread a row. Bytes: the partial sums once.
#include "core/cuda/ptx.cuh"
#include "ops/quantize/cuda/activated_source.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) weight_sums(const WideRows x, const float* partial_sums, int num_partials, float* d_weight) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t rows = x.offsets == nullptr ? x.rows : min(max(static_cast<std::int64_t>(__ldg(x.offsets + x.groups)), std::int64_t{0}), x.rows);
  if (row >= rows) return;
  float sums[4] = {};
  for (int b = 0; b < num_partials; b += 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (b + q < num_partials) sums[q] += partial_sums[row * num_partials + b + q];
    }
  }
  d_weight[row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

void launch_weight_sums(const ActivatedCall& call, float* d_weight, cudaStream_t stream) {
  if (call.x.rows == 0) return;
  const auto ctas = static_cast<unsigned>((call.x.rows + kThreads - 1) / kThreads);
  weight_sums<<<ctas, kThreads, 0, stream>>>(call.x, call.source.partial_sums, call.source.num_partials, d_weight);
}

}  // namespace waybill::cuda
