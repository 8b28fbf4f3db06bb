// SPDX-License-Identifier: Apache-2.0
// The gradient of a route's weight from those of its slices. A thread a route.
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) moe_sum_slices(const float* d_expanded, std::int64_t count, int t, float* d_weights) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int j = 0; j < t; ++j) sum += d_expanded[i * t + j];
  d_weights[i] = sum;
}

}  // namespace

void launch_sum_slices(const float* d_expanded, std::int64_t count, int t, float* d_weights, cudaStream_t stream) {
  if (count > 0) moe_sum_slices<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(d_expanded, count, t, d_weights);
}

}  // namespace waybill::cuda
