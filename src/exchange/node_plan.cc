// SPDX-License-Identifier: Apache-2.0
#include "exchange/node_plan.h"

#include <algorithm>
#include <map>

namespace waybill {
namespace {

// A token's destination nodes in node order, each with its set of ranks. Two passes over the plan use it: count, then fill.
struct NodeSets {
  std::vector<int> nodes;
  std::vector<std::vector<std::byte>> masks;  // [nodes of the group]
};

void collect(const RoutePlan& plan, const std::vector<int>& row_rank, const NodeMap& map, std::int64_t t, NodeSets& sets) {
  sets.nodes.clear();
  const auto token = static_cast<std::size_t>(t);
  for (std::int64_t i = plan.token_offsets[token]; i < plan.token_offsets[token + 1]; ++i) {
    const int p = row_rank[static_cast<std::size_t>(plan.token_rows[static_cast<std::size_t>(i)])];
    const int node = map.node(p);
    std::vector<std::byte>& mask = sets.masks[static_cast<std::size_t>(node)];
    if (std::find(sets.nodes.begin(), sets.nodes.end(), node) == sets.nodes.end()) {
      sets.nodes.push_back(node);
      std::fill(mask.begin(), mask.end(), std::byte{0});
    }
    const auto bit = static_cast<unsigned>(map.index(p));
    mask[bit / 8] |= std::byte{1} << (bit % 8);
  }
  std::sort(sets.nodes.begin(), sets.nodes.end());
}

bool has_rank(const std::byte* mask, std::size_t bit) { return (mask[bit / 8] & std::byte{1} << (bit % 8)) != std::byte{0}; }

}  // namespace

NodeMap::NodeMap(const Topology& topology) : index_of(topology.node_of.size()) {
  std::map<int, int> numbers;
  for (std::size_t p = 0; p < topology.node_of.size(); ++p) {
    const int node = numbers.try_emplace(topology.node_of[p], static_cast<int>(numbers.size())).first->second;
    if (node == num_nodes()) ranks.emplace_back();
    node_of.push_back(node);
    index_of[p] = static_cast<int>(ranks[static_cast<std::size_t>(node)].size());
    ranks[static_cast<std::size_t>(node)].push_back(static_cast<int>(p));
  }
}

int NodeMap::gateway(int source, int node) const {
  if (this->node(source) == node) return source;
  const std::vector<int>& members = ranks_of(node);
  return members[static_cast<std::size_t>(index(source)) % members.size()];
}

void plan_node_rows(const RoutePlan& plan, const NodeMap& map, int rank, NodePlan& nodes, std::vector<std::vector<std::byte>>& masks) {
  const auto P = static_cast<std::size_t>(plan.P);
  std::vector<int> row_rank(plan.row_token.size());
  for (std::size_t p = 0; p < P; ++p) std::fill(row_rank.begin() + plan.row_offsets[p], row_rank.begin() + plan.row_offsets[p + 1], static_cast<int>(p));
  NodeSets sets;
  for (int node = 0; node < map.num_nodes(); ++node) sets.masks.emplace_back(map.mask_bytes(node));

  nodes.send_offsets.assign(P + 1, 0);
  nodes.token_offsets.assign(static_cast<std::size_t>(plan.T) + 1, 0);
  for (std::int64_t t = 0; t < plan.T; ++t) {
    collect(plan, row_rank, map, t, sets);
    for (const int node : sets.nodes) ++nodes.send_offsets[static_cast<std::size_t>(map.gateway(rank, node)) + 1];
    nodes.token_offsets[static_cast<std::size_t>(t) + 1] = nodes.token_offsets[static_cast<std::size_t>(t)] + static_cast<std::int64_t>(sets.nodes.size());
  }
  for (std::size_t p = 0; p < P; ++p) nodes.send_offsets[p + 1] += nodes.send_offsets[p];

  nodes.send_token.resize(static_cast<std::size_t>(nodes.send_offsets[P]));
  nodes.token_rows.clear();
  masks.assign(P, {});
  std::vector<std::int64_t> next(nodes.send_offsets.begin(), nodes.send_offsets.end() - 1);
  for (std::int64_t t = 0; t < plan.T; ++t) {
    collect(plan, row_rank, map, t, sets);
    for (const int node : sets.nodes) {
      const auto gateway = static_cast<std::size_t>(map.gateway(rank, node));
      const std::int64_t row = next[gateway]++;
      nodes.send_token[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(t);
      nodes.token_rows.push_back(static_cast<std::int32_t>(row));
      const std::vector<std::byte>& mask = sets.masks[static_cast<std::size_t>(node)];
      masks[gateway].insert(masks[gateway].end(), mask.begin(), mask.end());
    }
  }
}

void plan_forwards(const std::vector<std::int64_t>& rows_from, const std::vector<const std::byte*>& masks, const NodeMap& map, int rank, NodePlan& nodes) {
  const std::size_t P = rows_from.size();
  nodes.arrive_offsets.assign(P + 1, 0);
  for (std::size_t s = 0; s < P; ++s) nodes.arrive_offsets[s + 1] = nodes.arrive_offsets[s] + rows_from[s];
  const std::vector<int>& members = map.ranks_of(map.node(rank));
  const std::size_t mask_bytes = map.mask_bytes(map.node(rank));
  const auto for_rows_of = [&](std::size_t member, const auto& body) {
    for (std::size_t s = 0; s < P; ++s) {
      for (std::int64_t i = 0; i < rows_from[s]; ++i) {
        if (has_rank(masks[s] + static_cast<std::size_t>(i) * mask_bytes, member)) body(static_cast<std::int32_t>(nodes.arrive_offsets[s] + i));
      }
    }
  };

  nodes.forward_offsets.assign(P + 1, 0);
  nodes.forward_rows.clear();
  nodes.row_forward_offsets.assign(static_cast<std::size_t>(nodes.num_arrived()) + 1, 0);
  std::vector<std::size_t> member_of(P, members.size());
  for (std::size_t i = 0; i < members.size(); ++i) member_of[static_cast<std::size_t>(members[i])] = i;
  for (std::size_t q = 0; q < P; ++q) {
    if (member_of[q] < members.size()) {
      for_rows_of(member_of[q], [&](std::int32_t row) {
        nodes.forward_rows.push_back(row);
        ++nodes.row_forward_offsets[static_cast<std::size_t>(row) + 1];
      });
    }
    nodes.forward_offsets[q + 1] = static_cast<std::int64_t>(nodes.forward_rows.size());
  }
  for (std::size_t i = 1; i < nodes.row_forward_offsets.size(); ++i) nodes.row_forward_offsets[i] += nodes.row_forward_offsets[i - 1];
  // forward_rows is in rank order, so a row's forwards are appended in rank order.
  nodes.row_forwards.resize(nodes.forward_rows.size());
  std::vector<std::int64_t> next(nodes.row_forward_offsets.begin(), nodes.row_forward_offsets.end() - 1);
  for (std::size_t j = 0; j < nodes.forward_rows.size(); ++j) {
    nodes.row_forwards[static_cast<std::size_t>(next[static_cast<std::size_t>(nodes.forward_rows[j])]++)] = static_cast<std::int32_t>(j);
  }
}

}  // namespace waybill
