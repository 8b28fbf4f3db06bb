// SPDX-License-Identifier: Apache-2.0
// A thread an id. Bytes: the ids once.
#include "moe/cuda/keep_routes_parts.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id>
__global__ void __launch_bounds__(kThreads) moe_keep_routes_count(const KeepRoutes a) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= a.T * a.K) return;
  const auto id = static_cast<std::int64_t>(static_cast<const Id*>(a.ids)[at]);
  const std::int64_t segment = at % a.K * keep_segments_of(a.T) + at / a.K / kKeepSegment;
  if (id >= 0 && id < a.E) atomicAdd(a.places + segment * a.E + id, 1);
}

template <class Id>
void launch(const KeepRoutes& a, cudaStream_t stream) {
  moe_keep_routes_count<Id><<<static_cast<unsigned>((a.T * a.K + kThreads - 1) / kThreads), kThreads, 0, stream>>>(a);
}

}  // namespace

void launch_keep_routes_count(const KeepRoutes& a, cudaStream_t stream) { a.id_bytes == 2 ? launch<std::int16_t>(a, stream) : launch<std::int32_t>(a, stream); }

}  // namespace waybill::cuda
