// SPDX-License-Identifier: Apache-2.0
// A CTA a row of logits. Bytes: logits read three times (twice from cache), the gradient written once. Sums of a thread in fp32, of the CTA in double.
#include <cuda_bf16.h>

#include "core/cuda/block_sum.cuh"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const CrossEntropyRows c) {
  __shared__ float maxima[kThreads / 32];
  __shared__ double sums[kThreads / 32];
  const std::int64_t row = blockIdx.x;
  const float* logits = c.logits + row * c.vocab;
  auto* d_logits = c.d_logits == nullptr ? nullptr : static_cast<__nv_bfloat16*>(c.d_logits) + row * c.vocab;
  const std::int32_t target = c.targets[row];
  if (target < 0) {
    if (threadIdx.x == 0) c.losses[row] = 0.0;
    for (std::int64_t j = threadIdx.x; d_logits != nullptr && j < c.vocab; j += kThreads) d_logits[j] = __float2bfloat16_rn(0.0f);
    return;
  }
  float best = -INFINITY;
  for (std::int64_t j = threadIdx.x; j < c.vocab; j += kThreads) best = fmaxf(best, logits[j]);
  const float top = block_max<kThreads>(best, maxima);
  float part = 0.0f;
  for (std::int64_t j = threadIdx.x; j < c.vocab; j += kThreads) part += expf(logits[j] - top);
  const double total = block_sum<kThreads>(static_cast<double>(part), sums);
  if (threadIdx.x == 0) c.losses[row] = log(total) + (static_cast<double>(top) - static_cast<double>(logits[target]));
  if (d_logits == nullptr) return;
  const float factor = static_cast<float>(static_cast<double>(c.scale) / total);
  for (std::int64_t j = threadIdx.x; j < c.vocab; j += kThreads) {
    d_logits[j] = __float2bfloat16_rn(expf(logits[j] - top) * factor - (j == target ? c.scale : 0.0f));
  }
}

}  // namespace

void launch_cross_entropy_rows(const CrossEntropyRows& c, cudaStream_t stream) {
  if (c.rows > 0) cross_entropy_rows<<<static_cast<unsigned>(c.rows), kThreads, 0, stream>>>(c);
}

}  // namespace waybill::cuda
