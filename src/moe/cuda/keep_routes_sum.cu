// SPDX-License-Identifier: Apache-2.0
// A warp an expert goes through its segments, 32 at a time; each CTA counts the valid tokens for the capacity. Bytes: 8 a segment and expert.
#include "core/cuda/ptx.cuh"
#include "moe/cuda/keep_routes_parts.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ int warp_inclusive_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(ptx::kFullWarp, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) moe_keep_routes_sum(const KeepRoutes a) {
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
  const std::int64_t segments = a.K * keep_segments_of(a.T);
  int before = 0;
  for (std::int64_t first = 0; first < segments; first += 32) {
    const std::int64_t segment = first + lane;
    std::int32_t* place = a.places + segment * a.E + e;
    const int count = segment < segments ? *place : 0, sum = warp_inclusive_sum(count, lane);
    if (segment < segments) *place = before + sum - count;
    before += __shfl_sync(ptx::kFullWarp, sum, 31);
  }
  if (lane == 0 && before > capacity) atomicAdd(a.dropped, static_cast<std::int32_t>(before - capacity));
}

}  // namespace

void launch_keep_routes_sum(const KeepRoutes& a, cudaStream_t stream) {
  moe_keep_routes_sum<<<static_cast<unsigned>((a.E + kWarps - 1) / kWarps), kThreads, 0, stream>>>(a);
}

}  // namespace waybill::cuda
