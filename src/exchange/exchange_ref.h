// SPDX-License-Identifier: Apache-2.0
// The exchange of a whole group by loops over (rank, token, k), without a fabric: the definition the engines are tested against.
#pragma once

#include <vector>

#include "waybill/exchange.h"

namespace waybill::reference {

// All ranks' routes of one step, in rank order.
struct GroupRoutes {
  ExpertPlacement placement;
  std::vector<RouteView> routes;
};

// What rank `rank` receives.
ReceiveLayout receive_layout(const GroupRoutes& group, int rank, std::int64_t alignment);
// rows [R, H] of rank `rank`; x[p] is rank p's [T, H] fp32.
std::vector<float> received_rows(const GroupRoutes& group, int rank, const std::vector<const float*>& x, std::int64_t H);

// Local steps, in fp32 in the documented order: y [S_padded, H] from rows, z [R, H] from y.
std::vector<float> permute(const ReceiveLayout& layout, const std::vector<float>& rows, std::int64_t H);
std::vector<float> unpermute_reduce(const ReceiveLayout& layout, const std::vector<float>& y, bool weighted, std::int64_t H);

// out [T, H] of rank `rank`: the ranks' z in rank order; wire rounds each of them. z[p] is rank p's [R, H].
std::vector<float> combine(const GroupRoutes& group, int rank, const std::vector<std::vector<float>>& z, std::int64_t H, CombineWire wire);

// The same through gateways: node_of[p] in order of the nodes' first ranks; per node the ranks in rank order, then the nodes; wire
// rounds each node's sum where there are several nodes.
std::vector<float> combine_two_level(const GroupRoutes& group, int rank, const std::vector<int>& node_of, const std::vector<std::vector<float>>& z,
                                     std::int64_t H, CombineWire wire);

}  // namespace waybill::reference
