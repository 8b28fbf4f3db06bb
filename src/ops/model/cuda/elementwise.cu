// SPDX-License-Identifier: Apache-2.0
// Elementwise work between the model's matmuls, and the sum of a step's losses.
#include <cuda_bf16.h>

#include "core/cuda/block_sum.cuh"
#include "core/cuda/num_sms.h"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

// body(i) for every i < count.
template <class Body>
__global__ void __launch_bounds__(kThreads) each_element(std::int64_t count, const Body body) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * kThreads)
    body(i);
}
template <class Body>
void launch(std::int64_t count, const Body& body, cudaStream_t stream) {
  if (count == 0) return;
  const std::int64_t blocks = (count + kThreads - 1) / kThreads, most = 16 * num_sms();
  each_element<<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0, stream>>>(count, body);
}

__global__ void __launch_bounds__(kThreads) sum_values(const double* values, std::int64_t count, double* total, bool accumulate) {
  __shared__ double room[kThreads / 32];
  double part = 0.0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) part += values[i];
  const double sum = block_sum<kThreads>(part, room);
  if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}

}  // namespace

void launch_sum(const double* values, std::int64_t count, double* total, bool accumulate, cudaStream_t stream) {
  sum_values<<<1, kThreads, 0, stream>>>(values, count, total, accumulate);
}

void launch_to_bf16(const float* x, void* y, std::int64_t count, cudaStream_t stream) {
  auto* out = static_cast<__nv_bfloat16*>(y);
  launch(
      count, [x, out] __device__(std::int64_t i) { out[i] = __float2bfloat16_rn(x[i]); }, stream);
}

void launch_add(const float* a, const float* b, float* y, std::int64_t count, cudaStream_t stream) {
  launch(
      count, [a, b, y] __device__(std::int64_t i) { y[i] = a[i] + b[i]; }, stream);
}

void launch_sum_parts(const float* parts, int num_parts, float* y, std::int64_t count, cudaStream_t stream) {
  launch(
      count,
      [parts, num_parts, y, count] __device__(std::int64_t i) {
        float sum = parts[i];
        for (int p = 1; p < num_parts; ++p) sum += parts[p * count + i];
        y[i] = sum;
      },
      stream);
}

}  // namespace waybill::cuda
