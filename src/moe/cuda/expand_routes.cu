// SPDX-License-Identifier: Apache-2.0
// Expert tensor parallelism: id e becomes t routes e t + j. A thread a route.
//
// Worked example, t = 2: ids {3, -1} with weights {0.5, 0} become {6, 7, -1, -1} with {0.5, 0.5, 0, 0}.
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id, class OutId>
__global__ void __launch_bounds__(kThreads) moe_expand_routes(const ExpandRoutes a) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.count) return;
  const int id = static_cast<const Id*>(a.ids)[i];
  const float weight = a.weights[i];
  for (int j = 0; j < a.t; ++j) {
    static_cast<OutId*>(a.out_ids)[i * a.t + j] = id >= 0 ? static_cast<OutId>(id * a.t + j) : static_cast<OutId>(-1);
    a.out_weights[i * a.t + j] = id >= 0 ? weight : 0.0f;
  }
}

}  // namespace

void launch_expand_routes(const ExpandRoutes& a, cudaStream_t stream) {
  if (a.count == 0) return;
  const auto ctas = static_cast<unsigned>((a.count + kThreads - 1) / kThreads);
  if (a.id_bytes == 4) {
    moe_expand_routes<std::int32_t, std::int32_t><<<ctas, kThreads, 0, stream>>>(a);
  } else if (a.out_id_bytes == 4) {
    moe_expand_routes<std::int16_t, std::int32_t><<<ctas, kThreads, 0, stream>>>(a);
  } else {
    moe_expand_routes<std::int16_t, std::int16_t><<<ctas, kThreads, 0, stream>>>(a);
  }
}

}  // namespace waybill::cuda
