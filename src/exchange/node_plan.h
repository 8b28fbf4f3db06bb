// SPDX-License-Identifier: Apache-2.0
// Who passes on whose rows: the plan of a two-level exchange. No communication here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "waybill/exchange.h"

namespace waybill {

// The nodes of a group, numbered by their first rank; any number of ranks each, in any arrangement.
struct NodeMap {
  std::vector<int> node_of;             // [P]
  std::vector<int> index_of;            // [P] place of a rank among its node's
  std::vector<std::vector<int>> ranks;  // [nodes] in rank order

  explicit NodeMap(const Topology& topology);
  int num_nodes() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& ranks_of(int node) const { return ranks[static_cast<std::size_t>(node)]; }
  int node(int rank) const { return node_of[static_cast<std::size_t>(rank)]; }
  int index(int rank) const { return index_of[static_cast<std::size_t>(rank)]; }
  // The rank of `node` that takes the rows of `source` in.
  int gateway(int source, int node) const;
  // Does this topology have two levels: several nodes, and more than one rank on one of them?
  bool has_two_levels() const { return num_nodes() > 1 && static_cast<std::size_t>(num_nodes()) < node_of.size(); }
  // A set of a node's ranks, one bit a rank in rank order.
  std::size_t mask_bytes(int node) const { return (ranks_of(node).size() + 7) / 8; }
};

// Worked example (its test uses these numbers): P = 4 on nodes {0, 1}, {2, 3}, E = 4, one expert a rank, K = 2, ids of rank 0 =
// {{2,3}, {0,2}, {1,0}}. The gateway of rank 0 on node 1 is rank 2, so as source
//   send_offsets  = {0, 2, 2, 4, 4}   rank 0 itself (own node): tokens 1, 2; rank 2: tokens 0, 1
//   send_token    = {1, 2, 0, 1}
//   token_offsets = {0, 1, 3, 4}, token_rows = {2, 0, 3, 1}
//   masks         = rank 0: {01, 11}, rank 2: {11, 01} (bit 0 = the node's first rank)
// Fills the source's part of `nodes`; masks[p] are the bytes for gateway p, mask_bytes() a row.
void plan_node_rows(const RoutePlan& plan, const NodeMap& map, int rank, NodePlan& nodes, std::vector<std::vector<std::byte>>& masks);

// Fills the gateway's part from the arrived masks: masks[s] points at rows_from[s] masks.
void plan_forwards(const std::vector<std::int64_t>& rows_from, const std::vector<const std::byte*>& masks, const NodeMap& map, int rank, NodePlan& nodes);

}  // namespace waybill
