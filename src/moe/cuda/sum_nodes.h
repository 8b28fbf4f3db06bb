// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// totals [n], those of this node's ranks, become those of all nodes: part m of others [nodes][n] is node m's, the own part is not read. global [E] = totals
// [first, first + E) + accumulated [E], where given.
struct SumNodesArgs {
  const std::int32_t* others;
  std::int32_t nodes, node, n, E, first;
  const std::int32_t* accumulated;  // or null: 0
  std::int32_t* totals;
  std::int32_t* global;  // or null
};
void launch_sum_nodes(const SumNodesArgs& args, cudaStream_t stream);

}  // namespace waybill::cuda
