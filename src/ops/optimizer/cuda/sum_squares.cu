// SPDX-License-Identifier: Apache-2.0
// A CTA a chunk, then a CTA a unit. Bytes: gradients read once.
#include "core/cuda/block_sum.cuh"
#include "ops/optimizer/cuda/optimizer_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) chunk_squares(const SumSquares c) {
  __shared__ double room[kThreads / 32];
  const OptimizerChunk chunk = c.chunks[blockIdx.x];
  double part = 0.0;
  for (std::int64_t i = chunk.first + threadIdx.x; i < chunk.first + chunk.count; i += kThreads) {
    const double g = static_cast<double>(c.grad[i]);
    part += g * g;
  }
  const double sum = block_sum<kThreads>(part, room);
  if (threadIdx.x == 0) c.chunk_squares[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) unit_squares(const SumSquares c) {
  __shared__ double room[kThreads / 32];
  double part = 0.0;
  for (std::int64_t i = c.unit_begin[blockIdx.x] + threadIdx.x; i < c.unit_begin[blockIdx.x + 1]; i += kThreads) part += c.chunk_squares[i];
  const double sum = block_sum<kThreads>(part, room);
  if (threadIdx.x == 0) c.squares[c.units[blockIdx.x]] = sum;
}

}  // namespace

void launch_sum_squares(const SumSquares& c, cudaStream_t stream) {
  if (c.num_units == 0) return;
  chunk_squares<<<static_cast<unsigned>(c.num_chunks), kThreads, 0, stream>>>(c);
  unit_squares<<<static_cast<unsigned>(c.num_units), kThreads, 0, stream>>>(c);
}

}  // namespace waybill::cuda
