// SPDX-License-Identifier: Apache-2.0
#include "moe/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace waybill::moe {

std::int64_t expert_capacity(double factor, std::int64_t T, std::int64_t K, std::int64_t E) {
  const double routes = static_cast<double>(T) * static_cast<double>(K);
  return static_cast<std::int64_t>(std::min(std::ceil(factor * routes / static_cast<double>(E)), routes));
}

std::int64_t drop_over_capacity(const RouteView& route, std::int64_t capacity, Route& kept) {
  if (kept.T() != route.T || kept.K() != route.K || kept.E() != route.E) kept = Route(route.T, route.K, route.E);
  const RouteView& out = kept.view();
  std::vector<std::int64_t> taken(static_cast<std::size_t>(route.E), 0);
  std::int64_t dropped = 0;
  for (std::int64_t k = 0; k < route.K; ++k) {
    for (std::int64_t t = 0; t < route.T; ++t) {
      const std::int32_t id = route.id(t, k);
      const bool fits = is_route(id, route.E) && taken[static_cast<std::size_t>(id)]++ < capacity;
      if (is_route(id, route.E) && !fits) ++dropped;
      out.set_id(t, k, fits ? id : -1);
      out.weights[t * route.K + k] = fits ? route.weights[t * route.K + k] : 0.0f;
    }
  }
  kept.recount();
  return dropped;
}

void pad_to_capacity(ReceiveLayout& layout, std::int64_t slots_per_expert) {
  const std::int64_t total = layout.L * slots_per_expert;
  WB_CHECK(total <= std::numeric_limits<std::int32_t>::max(), "padding {} experts to {} slots each makes more than 2^31 - 1 slots", layout.L, slots_per_expert);
  std::vector<std::int32_t> slot_row(static_cast<std::size_t>(total), -1);
  std::vector<float> slot_weight(static_cast<std::size_t>(total), 0.0f);
  std::vector<std::int64_t> moved(layout.slot_row.size(), -1);  // old expert-order slot -> new one
  for (std::int64_t e = 0; e < layout.L; ++e) {
    const auto expert = static_cast<std::size_t>(e);
    WB_ASSERT(layout.expert_counts[expert] <= slots_per_expert);
    for (std::int64_t i = 0; i < layout.expert_counts[expert]; ++i) {
      const auto from = static_cast<std::size_t>(layout.expert_offsets[expert] + i), to = static_cast<std::size_t>(e * slots_per_expert + i);
      slot_row[to] = layout.slot_row[from];
      slot_weight[to] = layout.slot_weight[from];
      moved[from] = static_cast<std::int64_t>(to);
    }
  }
  for (std::int64_t& position : layout.slot_position) position = moved[static_cast<std::size_t>(position)];
  for (std::int64_t e = 0; e <= layout.L; ++e) layout.expert_offsets[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e * slots_per_expert);
  layout.slot_row = std::move(slot_row);
  layout.slot_weight = std::move(slot_weight);
}

}  // namespace waybill::moe
