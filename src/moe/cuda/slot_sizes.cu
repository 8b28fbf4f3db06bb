// SPDX-License-Identifier: Apache-2.0
// Sizes of the experts' groups and the verdict of the budgets. One CTA.
#include "moe/cuda/slot_sizes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    exchange_slot_sizes(const HandleHeader* header, const std::int32_t* offsets, std::int32_t L, std::int32_t* sizes, std::int32_t* valid) {
  const bool is_valid = header->valid != 0;
  for (int e = static_cast<int>(threadIdx.x); e < L; e += kThreads) sizes[e] = is_valid ? offsets[e + 1] - offsets[e] : 0;
  if (threadIdx.x == 0) *valid = is_valid ? 1 : 0;
}

}  // namespace

void launch_slot_sizes(const HandleHeader* header, const std::int32_t* offsets, std::int32_t L, std::int32_t* sizes, std::int32_t* valid, cudaStream_t stream) {
  exchange_slot_sizes<<<1, kThreads, 0, stream>>>(header, offsets, L, sizes, valid);
}

}  // namespace waybill::cuda
