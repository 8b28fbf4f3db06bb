// SPDX-License-Identifier: Apache-2.0
// Forward: a warp a row; bytes: x read twice (the second time from cache), y written. Backward: a CTA a chunk of 64 rows, which sums its part of d_weight
// by columns, then writes dx by rows; a second kernel adds the chunks in order.
#include <cuda_bf16.h>

#include "core/cuda/block_sum.cuh"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) rms_norm_forward(const RmsNormForward c) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= c.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* x = c.x + row * c.width;
  float squares = 0.0f;
  for (std::int64_t i = lane; i < c.width; i += 32) squares = fmaf(x[i], x[i], squares);
  const float rstd = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(c.width) + c.epsilon);
  if (lane == 0 && c.rstd != nullptr) c.rstd[row] = rstd;
  for (std::int64_t i = lane; i < c.width; i += 32) {
    const float y = x[i] * rstd * c.weight[i];
    if (c.y_is_bf16) {
      static_cast<__nv_bfloat16*>(c.y)[row * c.width + i] = __float2bfloat16_rn(y);
    } else {
      static_cast<float*>(c.y)[row * c.width + i] = y;
    }
  }
}

// dx may be dy: the columns are summed before a row is written.
__global__ void __launch_bounds__(kThreads) rms_norm_backward(const RmsNormBackward c) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRmsNormChunk, last = min(first + kRmsNormChunk, c.rows);
  for (std::int64_t i = threadIdx.x; i < c.width; i += kThreads) {
    float sum = 0.0f;
    for (std::int64_t r = first; r < last; ++r) sum += c.dy[r * c.width + i] * (c.x[r * c.width + i] * c.rstd[r]);
    c.partial[blockIdx.x * c.width + i] = sum;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t r = first + threadIdx.x / 32; r < last; r += kWarps) {
    const float *x = c.x + r * c.width, *dy = c.dy + r * c.width;
    const float rstd = c.rstd[r];
    float dot = 0.0f;
    for (std::int64_t i = lane; i < c.width; i += 32) dot = fmaf(dy[i] * c.weight[i], x[i] * rstd, dot);
    const float mean = warp_sum(dot) / static_cast<float>(c.width);
    for (std::int64_t i = lane; i < c.width; i += 32) {
      const float d = (dy[i] * c.weight[i] - x[i] * rstd * mean) * rstd;
      float& dx = c.dx[r * c.width + i];
      dx = c.accumulate ? dx + d : d;
    }
  }
}

__global__ void __launch_bounds__(kThreads) rms_norm_weight(const float* partial, std::int64_t chunks, std::int64_t width, float* d_weight) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= width) return;
  float sum = d_weight[i];
#pragma unroll 8
  for (std::int64_t c = 0; c < chunks; ++c) sum += partial[c * width + i];
  d_weight[i] = sum;
}

unsigned blocks(std::int64_t count, std::int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

}  // namespace

void launch_rms_norm_forward(const RmsNormForward& c, cudaStream_t stream) {
  if (c.rows > 0) rms_norm_forward<<<blocks(c.rows, kWarps), kThreads, 0, stream>>>(c);
}

void launch_rms_norm_backward(const RmsNormBackward& c, cudaStream_t stream) {
  if (c.rows == 0) return;
  const unsigned chunks = blocks(c.rows, kRmsNormChunk);
  rms_norm_backward<<<chunks, kThreads, 0, stream>>>(c);
  rms_norm_weight<<<blocks(c.width, kThreads), kThreads, 0, stream>>>(c.partial, chunks, c.width, c.d_weight);
}

}  // namespace waybill::cuda
