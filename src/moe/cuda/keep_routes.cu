// SPDX-License-Identifier: Apache-2.0
// Capacity mode: which routes fit. First choices go before second choices, earlier tokens before later ones, so a route's place at its expert is how often that
// expert was named before it. The ids are cut into segments of one choice and kSegment tokens: counted (a thread an id), their counts summed before each
// segment (a warp an expert), then placed (a warp a segment, 32 tokens at a time, the expert's sum its running place). It is the mode to compare with;
// dropless routes never come here. Bytes: the ids twice, weights once, 8 bytes a segment and expert.
//
// Worked example, capacity 1, ids of tokens 0..3 {0, 1}, {0, 2}, {1, 0}, {1, 3}: kept {0, -}, {-, 2}, {1, -}, {-, 3}; 4 dropped.
#include "core/cuda/ptx.cuh"
#include "moe/cuda/keep_routes_parts.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

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

template <class Id>
void launch(const KeepRoutes& a, cudaStream_t stream) {
  const std::int64_t segments = a.K * keep_segments_of(a.T);
  moe_keep_routes_place<Id><<<static_cast<unsigned>((segments + kWarps - 1) / kWarps), kThreads, 0, stream>>>(a);
}

}  // namespace

void launch_keep_routes(const KeepRoutes& a, cudaStream_t stream) {
  (void)cudaMemsetAsync(a.places, 0, keep_places(a.T, a.K, a.E) * sizeof(std::int32_t), stream);  // an error shows at the launch
  if (a.T > 0) launch_keep_routes_count(a, stream);
  launch_keep_routes_sum(a, stream);
  if (a.T > 0) a.id_bytes == 2 ? launch<std::int16_t>(a, stream) : launch<std::int32_t>(a, stream);
}

}  // namespace waybill::cuda
