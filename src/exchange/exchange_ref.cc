// SPDX-License-Identifier: Apache-2.0
#include "exchange/exchange_ref.h"

#include <algorithm>

#include "route/route_plan_ref.h"

namespace waybill::reference {
namespace {

bool goes_to(const GroupRoutes& group, const RouteView& route, std::int64_t t, std::int64_t k, int rank) {
  const std::int32_t id = route.id(t, k);
  return id >= 0 && id < route.E && group.placement.rank_of(id) == rank;
}

bool has_row(const GroupRoutes& group, const RouteView& route, std::int64_t t, int rank) {
  for (std::int64_t k = 0; k < route.K; ++k) {
    if (goes_to(group, route, t, k, rank)) return true;
  }
  return false;
}

}  // namespace

ReceiveLayout receive_layout(const GroupRoutes& group, int rank, std::int64_t alignment) {
  std::vector<std::int64_t> row_offsets = {0}, row_slot_offsets = {0};
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
  for (const RouteView& route : group.routes) {
    for (std::int64_t t = 0; t < route.T; ++t) {
      if (!has_row(group, route, t, rank)) continue;
      for (std::int64_t k = 0; k < route.K; ++k) {
        if (!goes_to(group, route, t, k, rank)) continue;
        experts.push_back(static_cast<std::int32_t>(group.placement.local_of(route.id(t, k))));
        weights.push_back(route.weights[t * route.K + k]);
      }
      row_slot_offsets.push_back(static_cast<std::int64_t>(experts.size()));
    }
    row_offsets.push_back(static_cast<std::int64_t>(row_slot_offsets.size()) - 1);
  }
  return make_receive_layout(group.placement.P, group.placement.L(), row_offsets, row_slot_offsets, experts.data(), weights.data(), alignment);
}

std::vector<float> received_rows(const GroupRoutes& group, int rank, const std::vector<const float*>& x, std::int64_t H) {
  std::vector<float> rows;
  for (std::size_t p = 0; p < group.routes.size(); ++p) {
    for (std::int64_t t = 0; t < group.routes[p].T; ++t) {
      if (has_row(group, group.routes[p], t, rank)) rows.insert(rows.end(), x[p] + t * H, x[p] + (t + 1) * H);
    }
  }
  return rows;
}

std::vector<float> permute(const ReceiveLayout& layout, const std::vector<float>& rows, std::int64_t H) {
  std::vector<float> y;
  for (const std::int32_t row : layout.slot_row) {
    for (std::int64_t h = 0; h < H; ++h) y.push_back(row < 0 ? 0.0f : rows[static_cast<std::size_t>(row * H + h)]);
  }
  return y;
}

std::vector<float> unpermute_reduce(const ReceiveLayout& layout, const std::vector<float>& y, bool weighted, std::int64_t H) {
  std::vector<float> z(static_cast<std::size_t>(layout.R() * H), 0.0f);
  for (std::size_t r = 0; r < static_cast<std::size_t>(layout.R()); ++r) {
    for (auto j = static_cast<std::size_t>(layout.row_slot_offsets[r]); j < static_cast<std::size_t>(layout.row_slot_offsets[r + 1]); ++j) {
      const auto slot = static_cast<std::size_t>(layout.slot_position[j]);
      for (std::size_t h = 0; h < static_cast<std::size_t>(H); ++h) {
        z[r * static_cast<std::size_t>(H) + h] += (weighted ? layout.slot_weight[slot] : 1.0f) * y[slot * static_cast<std::size_t>(H) + h];
      }
    }
  }
  return z;
}

std::vector<float> combine(const GroupRoutes& group, int rank, const std::vector<std::vector<float>>& z, std::int64_t H, CombineWire wire) {
  const RouteView& route = group.routes[static_cast<std::size_t>(rank)];
  const bool rounded = wire == CombineWire::kBF16 && group.placement.P > 1;
  std::vector<float> out(static_cast<std::size_t>(route.T * H), 0.0f);
  for (int p = 0; p < group.placement.P; ++p) {
    std::int64_t row = receive_layout(group, p, 1).row_offsets[static_cast<std::size_t>(rank)];
    for (std::int64_t t = 0; t < route.T; ++t) {
      if (!has_row(group, route, t, p)) continue;
      for (std::int64_t h = 0; h < H; ++h) {
        const float part = z[static_cast<std::size_t>(p)][static_cast<std::size_t>(row * H + h)];
        out[static_cast<std::size_t>(t * H + h)] += rounded ? static_cast<float>(bf16(part)) : part;
      }
      ++row;
    }
  }
  return out;
}

std::vector<float> combine_two_level(const GroupRoutes& group, int rank, const std::vector<int>& node_of, const std::vector<std::vector<float>>& z,
                                     std::int64_t H, CombineWire wire) {
  const RouteView& route = group.routes[static_cast<std::size_t>(rank)];
  const int num_nodes = *std::max_element(node_of.begin(), node_of.end()) + 1;
  std::vector<float> out(static_cast<std::size_t>(route.T * H), 0.0f);
  for (int node = 0; node < num_nodes; ++node) {
    std::vector<float> partial(out.size(), 0.0f);
    for (int p = 0; p < group.placement.P; ++p) {
      if (node_of[static_cast<std::size_t>(p)] != node) continue;
      std::int64_t row = receive_layout(group, p, 1).row_offsets[static_cast<std::size_t>(rank)];
      for (std::int64_t t = 0; t < route.T; ++t) {
        if (!has_row(group, route, t, p)) continue;
        for (std::int64_t h = 0; h < H; ++h)
          partial[static_cast<std::size_t>(t * H + h)] += z[static_cast<std::size_t>(p)][static_cast<std::size_t>(row * H + h)];
        ++row;
      }
    }
    const bool rounded = wire == CombineWire::kBF16 && num_nodes > 1;
    for (std::size_t i = 0; i < out.size(); ++i) out[i] += rounded ? static_cast<float>(bf16(partial[i])) : partial[i];
  }
  return out;
}

}  // namespace waybill::reference
