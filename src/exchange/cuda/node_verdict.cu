// SPDX-License-Identifier: Apache-2.0
// What the other nodes' plans came to: a budget that was exceeded on one makes the plan invalid on all. One thread; reads [N] headers.
#include "exchange/cuda/node_lost.cuh"

namespace waybill::cuda {
namespace {

__global__ void exchange_node_verdict(const NodeArgs args, const HandleHeader* headers, HandleHeader* own) {
  if (is_given_up(args)) return mark_given_up(args, own);
  HandleHeader merged = *own;
  for (int m = 0; m < args.N; ++m) {
    if (m == args.node) continue;
    const HandleHeader other = headers[m];
    if (other.valid == 0) merged.valid = merged.R = merged.S = 0;
    merged.max_slot_demand = other.max_slot_demand > merged.max_slot_demand ? other.max_slot_demand : merged.max_slot_demand;
    merged.max_row_demand = other.max_row_demand > merged.max_row_demand ? other.max_row_demand : merged.max_row_demand;
  }
  *own = merged;
}

}  // namespace

void launch_node_verdict(const NodeArgs& args, const HandleHeader* headers, HandleHeader* own, cudaStream_t stream) {
  exchange_node_verdict<<<1, 1, 0, stream>>>(args, headers, own);
}

}  // namespace waybill::cuda
