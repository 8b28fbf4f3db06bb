// SPDX-License-Identifier: Apache-2.0
// Capacity mode: which routes fit. A warp an expert reads all ids, choice by choice, and counts its own: T K ids an expert from the L2. It is the mode to
// compare with; dropless routes never come here.
//
// Worked example, capacity 1, ids of tokens 0..3 {0, 1}, {0, 2}, {1, 0}, {1, 3}: kept {0, -}, {-, 2}, {1, -}, {-, 3}; 4 dropped.
#include "core/cuda/ptx.cuh"
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Id>
__global__ void __launch_bounds__(kThreads) moe_keep_routes(const KeepRoutes a) {
  __shared__ int num_valid;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) num_valid = 0;
  __syncthreads();
  int own = 0;
  for (std::int64_t t = threadIdx.x; t < a.T; t += kThreads) own += a.mask == nullptr || a.mask[t] == 0 ? 1 : 0;
  own = static_cast<int>(ptx::redux_add(static_cast<unsigned>(own)));
  if (lane == 0) atomicAdd(&num_valid, own);
  __syncthreads();
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (e >= a.E) return;
  const double routes = static_cast<double>(num_valid) * static_cast<double>(a.K);
  const auto capacity = static_cast<std::int64_t>(fmin(ceil(a.factor * routes / static_cast<double>(a.E)), routes));
  if (e == 0 && lane == 0) a.dropped[1] = static_cast<std::int32_t>(capacity);
  const auto* ids = static_cast<const Id*>(a.ids);
  auto* kept_ids = static_cast<Id*>(a.kept_ids);
  std::int64_t taken = 0;
  for (std::int64_t k = 0; k < a.K; ++k) {
#pragma unroll 4
    for (std::int64_t t0 = 0; t0 < a.T; t0 += 32) {
      const std::int64_t t = t0 + lane, at = t * a.K + k;
      const int id = t < a.T ? static_cast<int>(ids[at]) : -2;
      const unsigned same = __ballot_sync(ptx::kFullWarp, id == e);
      const bool no_route = t < a.T && e == 0 && (id < 0 || id >= a.E);  // the first expert's warp writes what belongs to none
      if (id == e || no_route) {
        const bool fits = id == e && taken + __popc(same & ptx::lanemask_lt()) < capacity;
        kept_ids[at] = fits ? static_cast<Id>(id) : static_cast<Id>(-1);
        a.kept_weights[at] = fits ? a.weights[at] : 0.0f;
      }
      taken += __popc(same);
    }
  }
  if (lane == 0 && taken > capacity) atomicAdd(a.dropped, static_cast<std::int32_t>(taken - capacity));
}

}  // namespace

void launch_keep_routes(const KeepRoutes& a, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>((a.E + kWarps - 1) / kWarps);
  if (a.id_bytes == 2) {
    moe_keep_routes<std::int16_t><<<ctas, kThreads, 0, stream>>>(a);
  } else {
    moe_keep_routes<std::int32_t><<<ctas, kThreads, 0, stream>>>(a);
  }
}

}  // namespace waybill::cuda
