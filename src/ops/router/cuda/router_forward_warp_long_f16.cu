// SPDX-License-Identifier: Apache-2.0
// ptxas: may spill Li64ELi1E: biased rows of more than 2,304 experts, a few words around the exact path
#include "ops/router/cuda/router_forward_warp_launch.cuh"

namespace waybill::cuda {

void launch_router_forward_warp_long_f16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  launch_warp_long<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
