// SPDX-License-Identifier: Apache-2.0
// Whether replayed routes name an expert twice. A warp a row; each of its ids against those before it. Eager mode only: the host waits for the answer.
#include "core/cuda/ptx.cuh"
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Id>
__global__ void __launch_bounds__(kThreads) moe_find_duplicates(const Id* ids, std::int64_t T, std::int64_t K, std::int32_t* found) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; t < T; t += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    bool twice = false;
    for (std::int64_t k = lane; k < K; k += 32) {
      const Id id = ids[t * K + k];
      for (std::int64_t j = 0; j < k && id >= 0 && !twice; ++j) twice = ids[t * K + j] == id;
    }
    if (__any_sync(ptx::kFullWarp, twice ? 1 : 0) != 0 && lane == 0) *found = 1;
  }
}

}  // namespace

void launch_find_duplicates(const void* ids, int id_bytes, std::int64_t T, std::int64_t K, std::int32_t* found, cudaStream_t stream) {
  if (T == 0) return;
  const std::int64_t ctas = (T + kWarps - 1) / kWarps;
  const auto grid = static_cast<unsigned>(ctas < 1056 ? ctas : 1056);
  if (id_bytes == 2) {
    moe_find_duplicates<<<grid, kThreads, 0, stream>>>(static_cast<const std::int16_t*>(ids), T, K, found);
  } else {
    moe_find_duplicates<<<grid, kThreads, 0, stream>>>(static_cast<const std::int32_t*>(ids), T, K, found);
  }
}

}  // namespace waybill::cuda
