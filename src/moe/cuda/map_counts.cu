// SPDX-License-Identifier: Apache-2.0
// Routes per expert of a caller's dense map. A thread a cell; integers, so that the order of the additions does not matter.
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) moe_map_counts(const float* map, std::int64_t cells, std::int64_t E, std::int32_t* counts) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < cells; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    if (map[i] != 0.0f) atomicAdd(counts + i % E, 1);
  }
}

}  // namespace

void launch_map_counts(const float* map, std::int64_t T, std::int64_t E, std::int32_t* counts, cudaStream_t stream) {
  if (T > 0) moe_map_counts<<<264, kThreads, 0, stream>>>(map, T * E, E, counts);
}

}  // namespace waybill::cuda
