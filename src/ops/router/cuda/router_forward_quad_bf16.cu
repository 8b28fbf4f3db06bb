// SPDX-License-Identifier: Apache-2.0
// ptxas: may spill finish_counts: once a launch, by one CTA
// ptxas: may spill route_exactly: rows of ties and of underflowing scores only
// ptxas: may spill route_grouped_exactly: the same of grouped rows
#include "ops/router/cuda/router_forward_quad.cuh"

namespace waybill::cuda {

bool launch_router_forward_quad_bf16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  return launch_quads<__nv_bfloat16>(p, limits, stream);
}

}  // namespace waybill::cuda
