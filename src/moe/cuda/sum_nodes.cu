// SPDX-License-Identifier: Apache-2.0
// Counts of routes over nodes, behind moe_reduce_counts. One CTA. Integers: any order.
#include "moe/cuda/sum_nodes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads) moe_sum_nodes(const SumNodesArgs args) {
  for (int i = static_cast<int>(threadIdx.x); i < args.n; i += kThreads) {
    std::int32_t sum = args.totals[i];
    for (int m = 0; m < args.nodes; ++m) sum += m == args.node ? 0 : args.others[static_cast<std::int64_t>(m) * args.n + i];
    args.totals[i] = sum;
    const int e = i - args.first;
    if (args.global != nullptr && e >= 0 && e < args.E) args.global[e] = sum + (args.accumulated != nullptr ? args.accumulated[e] : 0);
  }
}

}  // namespace

void launch_sum_nodes(const SumNodesArgs& args, cudaStream_t stream) { moe_sum_nodes<<<1, kThreads, 0, stream>>>(args); }

}  // namespace waybill::cuda
