// SPDX-License-Identifier: Apache-2.0
// A thread a pair (x[i], x[i + D/2]); the order of operations is the CPU's, so are the bits. Bytes: x read and written.
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rope_pairs(const RopeCall c) {
  const std::int64_t half = c.D / 2, at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= c.T * c.heads * half) return;
  const std::int64_t row = at / half, i = at % half, position = row / c.heads % c.seq_len;
  const float cos = c.cos[position * half + i], sin = c.inverse ? -c.sin[position * half + i] : c.sin[position * half + i];
  float *a = c.x + row * c.D + i, *b = a + half;
  const float u = *a, v = *b;
  *a = u * cos - v * sin;
  *b = v * cos + u * sin;
}

}  // namespace

void launch_rope(const RopeCall& c, cudaStream_t stream) {
  const std::int64_t pairs = c.T * c.heads * (c.D / 2);
  if (pairs > 0) rope_pairs<<<static_cast<unsigned>((pairs + kThreads - 1) / kThreads), kThreads, 0, stream>>>(c);
}

}  // namespace waybill::cuda
