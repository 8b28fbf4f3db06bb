// SPDX-License-Identifier: Apache-2.0
// Grid-stride over rows, a warp a row, 8 columns a lane. Bytes: h and da read once, dh written once. d_weight: the order of sums is that of
// core/cuda/activation_math.cuh; 8 lanes hold a block of 64 columns.
#include <algorithm>

#include "ops/activation/cuda/activation_rows.cuh"

namespace waybill::cuda {
namespace {

// The sum over a block of 64 columns, of which this lane holds piece lane % 8; each of its 8 lanes gets it.
__device__ __forceinline__ float block_sum(const float (&product)[8]) {
  float t[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    t[q] = product[2 * q] + product[2 * q + 1];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) t[q] += __shfl_xor_sync(ptx::kFullWarp, t[q], step);
  }
  return (t[0] + t[1]) + (t[2] + t[3]);
}

template <ActivationKind kKind, RowAccess kAccess>
__global__ void __launch_bounds__(32 * kActivationWarps) activation_backward(const __grid_constant__ ActivationCall p) {
  const std::int64_t rows = rows_of(p);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ActivationLimits limits{p.limit, p.alpha};
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kActivationWarps + threadIdx.x / 32; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kActivationWarps) {
    const float weight = p.weight == nullptr ? 1.0f : __ldg(p.weight + row);
    float sum = 0.0f;
    for (std::int64_t first = 0; first < p.F; first += 256) {
      const std::int64_t f = first + 8 * lane;
      float product[8] = {};
      if (f < p.F) {
        float gate[8], up[8] = {}, da[8];
        load8<kAccess>(gate, p.h, row, f, p.F - f);
        if constexpr (is_gated(kKind)) load8<kAccess>(up, p.h, row, p.F + f, p.F - f);
        load8<kAccess>(da, p.a, row, f, p.F - f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const ActivationGradient g = activation_gradient<kKind, is_exact(kAccess)>(gate[i], up[i], da[i], weight, limits);
          product[i] = g.product, gate[i] = g.d_gate, up[i] = g.d_up;
        }
        store8<kAccess>(gate, p.dh, row, f, p.F - f);
        if constexpr (is_gated(kKind)) store8<kAccess>(up, p.dh, row, p.F + f, p.F - f);
      }
      if (p.d_weight != nullptr) sum += block_sum(product);
    }
    if (p.d_weight != nullptr) {
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 8);
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 16);
      if (lane == 0) p.d_weight[row] = sum;
    }
  }
}

}  // namespace

void launch_activation_backward(const ActivationCall& p, int num_sms, cudaStream_t stream) {
  if (p.rows == 0) return;
  dispatch_activation(p, {&p.h, &p.a, &p.dh}, [&]<ActivationKind kKind, RowAccess kAccess>() {
    activation_backward<kKind, kAccess><<<activation_grid(p, num_sms), 32 * kActivationWarps, 0, stream>>>(p);
  });
}

}  // namespace waybill::cuda
