// SPDX-License-Identifier: Apache-2.0
// ptxas: may spill finish_counts: once a launch, by one CTA
// ptxas: may spill route_exactly: rows of ties and of underflowing scores only
#include "ops/router/cuda/router_forward_warp_launch.cuh"

namespace waybill::cuda {

void launch_router_forward_warp_long_bf16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  launch_warp_long<__nv_bfloat16>(p, limits, stream);
}

}  // namespace waybill::cuda
