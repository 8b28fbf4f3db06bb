// SPDX-License-Identifier: Apache-2.0
// ptxas: may spill finish_counts: once a launch, by one CTA
// ptxas: may spill route_exactly: rows of ties and of underflowing scores only
#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_forward_sums.cuh"

namespace waybill::cuda {
namespace {

template <int kVectors, int kMode>
int launch_scores(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const bool softmax = p.rows.score == kScoreSoftmax || p.rows.score == kScoreSoftmaxSelected;
  return softmax ? launch_sums<kVectors, kMode, true>(p, limits, stream) : launch_sums<kVectors, kMode, false>(p, limits, stream);
}
template <int kVectors>
int launch_tier(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  return p.rows.bias == nullptr ? launch_scores<kVectors, kPlain>(p, limits, stream) : launch_scores<kVectors, kBiased>(p, limits, stream);
}

}  // namespace

int launch_router_forward_sums(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (limits.compute_major < 9 || p.rows.mask != nullptr || p.rows.score == kScoreSqrtSoftplus || p.num_kept < p.num_groups) return 0;
  const int tier = router_tuning::vector_tier(p.rows.E);
  if (tier == 18) return launch_tier<18>(p, limits, stream);
  return tier == 64 ? launch_tier<64>(p, limits, stream) : 0;
}

}  // namespace waybill::cuda
