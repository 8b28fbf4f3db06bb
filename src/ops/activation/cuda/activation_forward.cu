// SPDX-License-Identifier: Apache-2.0
// Grid-stride over rows, a warp a row, 8 columns a lane. Bytes: h read once, a written once.
#include <algorithm>

#include "ops/activation/cuda/activation_rows.cuh"

namespace waybill::cuda {
namespace {

template <ActivationKind kKind, RowAccess kAccess>
__global__ void __launch_bounds__(32 * kActivationWarps) activation_forward(const __grid_constant__ ActivationCall p) {
  const std::int64_t rows = rows_of(p);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ActivationLimits limits{p.limit, p.alpha};
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kActivationWarps + threadIdx.x / 32; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kActivationWarps) {
    const float weight = p.weight == nullptr ? 1.0f : __ldg(p.weight + row);
#pragma unroll 2
    for (std::int64_t f = 8 * lane; f < p.F; f += 256) {
      float gate[8], up[8] = {};
      load8<kAccess>(gate, p.h, row, f, p.F - f);
      if constexpr (is_gated(kKind)) load8<kAccess>(up, p.h, row, p.F + f, p.F - f);
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[i] = weight * activate<kKind, is_exact(kAccess)>(gate[i], up[i], limits);
      store8<kAccess>(gate, p.a, row, f, p.F - f);
    }
  }
}

}  // namespace

void launch_activation_forward(const ActivationCall& p, int num_sms, cudaStream_t stream) {
  if (p.rows == 0 || p.F == 0) return;
  dispatch_activation(p, {&p.h, &p.a}, [&]<ActivationKind kKind, RowAccess kAccess>() {
    activation_forward<kKind, kAccess><<<activation_grid(p, num_sms), 32 * kActivationWarps, 0, stream>>>(p);
  });
}

}  // namespace waybill::cuda
