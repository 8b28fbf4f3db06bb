// SPDX-License-Identifier: Apache-2.0
// Norms of a difference, for checks: a CTA a few rows, sums in double by atomics (their order does not matter here).
#include <cuda_bf16.h>

#include <algorithm>

#include "bench/cuda/moe/norms.h"

namespace waybill::cuda::moe_bench {
namespace {

__device__ __forceinline__ float value(const void* p, bool is_bf16, std::int64_t i) {
  return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]) : static_cast<const float*>(p)[i];
}

__global__ void __launch_bounds__(256) norms(const void* a, bool a_is_bf16, const void* b, bool b_is_bf16, std::int64_t rows, std::int64_t columns,
                                             const std::int32_t* places, std::int64_t K, double* sums) {
  double difference = 0, size = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    bool whole = true;
    for (std::int64_t k = 0; places != nullptr && k < K; ++k) whole &= places[row * K + k] >= 0;
    if (!whole) continue;
    for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
      const float x = value(a, a_is_bf16, row * columns + c), y = value(b, b_is_bf16, row * columns + c);
      difference += static_cast<double>(x - y) * static_cast<double>(x - y), size += static_cast<double>(y) * static_cast<double>(y);
    }
  }
  for (int d = 16; d > 0; d /= 2) {
    difference += __shfl_xor_sync(0xffffffffu, difference, d);
    size += __shfl_xor_sync(0xffffffffu, size, d);
  }
  if (threadIdx.x % 32 == 0) atomicAdd(sums, difference), atomicAdd(sums + 1, size);
}

}  // namespace

void launch_norms(const void* a, bool a_is_bf16, const void* b, bool b_is_bf16, std::int64_t rows, std::int64_t columns, const std::int32_t* places,
                  std::int64_t K, double* sums, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(std::max<std::int64_t>(rows, 1), 2112));
  norms<<<grid, 256, 0, stream>>>(a, a_is_bf16, b, b_is_bf16, rows, columns, places, K, sums);
}

}  // namespace waybill::cuda::moe_bench
