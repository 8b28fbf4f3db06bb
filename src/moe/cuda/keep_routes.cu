// SPDX-License-Identifier: Apache-2.0
// Capacity mode: which routes fit. First choices go before second choices, earlier tokens before later ones, so a route's place at its expert is how often that
// expert was named before it. The ids are cut into segments of one choice and kSegment tokens: counted (a thread an id), their counts summed before each
// segment (a warp an expert), then placed (a warp a segment, 32 tokens at a time, the expert's sum its running place). It is the mode to compare with;
// dropless routes never come here. Bytes: the ids twice, weights once, 8 bytes a segment and expert.
//
// Worked example, capacity 1, ids of tokens 0..3 {0, 1}, {0, 2}, {1, 0}, {1, 3}: kept {0, -}, {-, 2}, {1, -}, {-, 3}; 4 dropped.
#include "core/cuda/ptx.cuh"
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Places [segments, E]: counts first, then how many routes of the expert lie before the segment.
template <class Id>
__global__ void __launch_bounds__(kThreads) moe_keep_routes_count(const KeepRoutes a) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= a.T * a.K) return;
  const auto id = static_cast<std::int64_t>(static_cast<const Id*>(a.ids)[at]);
  const std::int64_t segment = at % a.K * keep_segments_of(a.T) + at / a.K / kKeepSegment;
  if (id >= 0 && id < a.E) atomicAdd(a.places + segment * a.E + id, 1);
}

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

template <class Id>
__global__ void __launch_bounds__(kThreads) moe_keep_routes_place(const KeepRoutes a) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  // 32 bits: a division of 64 is a call, around which registers spill.
  const int segment = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32), per_choice = static_cast<int>(keep_segments_of(a.T));
  if (segment >= a.K * per_choice) return;
  const std::int64_t k = segment / per_choice, begin = static_cast<std::int64_t>(segment % per_choice) * kKeepSegment;
  const std::int64_t end = begin + kKeepSegment < a.T ? begin + kKeepSegment : a.T;
  const std::int32_t capacity = a.dropped[1];
  auto* kept_ids = static_cast<Id*>(a.kept_ids);
  volatile std::int32_t* places = a.places + segment * a.E;  // this warp's alone
  for (std::int64_t t0 = begin; t0 < end; t0 += 32) {
    const std::int64_t t = t0 + lane, at = t * a.K + k;
    const int id = t < end ? static_cast<int>(static_cast<const Id*>(a.ids)[at]) : -1;
    const bool is_route = id >= 0 && id < a.E;
    const unsigned same = __match_any_sync(ptx::kFullWarp, is_route ? id : -1);
    const int place = (is_route ? places[id] : 0) + __popc(same & ptx::lanemask_lt());
    __syncwarp();  // all have read
    if (is_route && (same & ptx::lanemask_lt()) == 0) places[id] = place + __popc(same);
    __syncwarp();
    if (t >= end) continue;
    const bool fits = is_route && place < capacity;
    kept_ids[at] = fits ? static_cast<Id>(id) : static_cast<Id>(-1);
    a.kept_weights[at] = fits ? a.weights[at] : 0.0f;
  }
}

unsigned ctas(std::int64_t count, int per) { return static_cast<unsigned>((count + per - 1) / per); }

template <class Id>
void launch(const KeepRoutes& a, cudaStream_t stream) {
  if (a.T > 0) moe_keep_routes_count<Id><<<ctas(a.T * a.K, kThreads), kThreads, 0, stream>>>(a);
  moe_keep_routes_sum<<<ctas(a.E, kWarps), kThreads, 0, stream>>>(a);
  if (a.T > 0) moe_keep_routes_place<Id><<<ctas(a.K * keep_segments_of(a.T), kWarps), kThreads, 0, stream>>>(a);
}

}  // namespace

void launch_keep_routes(const KeepRoutes& a, cudaStream_t stream) {
  (void)cudaMemsetAsync(a.places, 0, keep_places(a.T, a.K, a.E) * sizeof(std::int32_t), stream);  // an error shows at the launch
  a.id_bytes == 2 ? launch<std::int16_t>(a, stream) : launch<std::int32_t>(a, stream);
}

}  // namespace waybill::cuda
