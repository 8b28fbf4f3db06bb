// SPDX-License-Identifier: Apache-2.0
#include "moe/etp.h"

namespace waybill::moe {

void make_etp_tables(std::int64_t E, int P, int t, std::vector<std::int32_t>& rank_table, std::vector<std::int32_t>& local_table) {
  const std::int64_t experts_per_team = E / (P / t);
  rank_table.resize(static_cast<std::size_t>(E * t));
  local_table.resize(rank_table.size());
  for (std::int64_t e = 0; e < E; ++e) {
    for (int j = 0; j < t; ++j) {
      const auto id = static_cast<std::size_t>(e * t + j);
      rank_table[id] = static_cast<std::int32_t>(e / experts_per_team * t + j);
      local_table[id] = static_cast<std::int32_t>(e % experts_per_team);
    }
  }
}

void expand_route(const RouteView& route, int t, Route& expanded) {
  if (expanded.T() != route.T || expanded.K() != route.K * t || expanded.E() != route.E * t) expanded = Route(route.T, route.K * t, route.E * t);
  const RouteView& out = expanded.view();
  for (std::int64_t i = 0; i < route.T; ++i) {
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(i, k);
      for (int j = 0; j < t; ++j) {
        out.set_id(i, k * t + j, is_route(id, route.E) ? id * t + j : -1);
        out.weights[(i * route.K + k) * t + j] = is_route(id, route.E) ? route.weights[i * route.K + k] : 0.0f;
      }
    }
  }
  expanded.recount();
}

void reduce_expanded(const float* d_expanded, std::int64_t T, std::int64_t K, int t, float* d_weights) {
  for (std::int64_t i = 0; i < T * K; ++i) {
    float sum = 0.0f;
    for (int j = 0; j < t; ++j) sum += d_expanded[i * t + j];
    d_weights[i] = sum;
  }
}

}  // namespace waybill::moe
