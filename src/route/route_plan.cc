// SPDX-License-Identifier: Apache-2.0
// The sender's plan: two passes over the ids (count, place) and a counting sort of the rows by token.
#include "waybill/route_plan.h"

#include <algorithm>
#include <limits>

namespace waybill {
namespace {

// Calls body(t, k, id, rank, first) for every valid id in (t, k) order; first = the token's first slot on that rank.
template <class Body>
void for_each_slot(const RouteView& route, const ExpertPlacement& placement, std::vector<std::int32_t>& last_token, const Body& body) {
  std::fill(last_token.begin(), last_token.end(), -1);
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      if (!is_route(id, route.E)) continue;
      const auto rank = static_cast<std::size_t>(placement.rank_of(id));
      const bool first = last_token[rank] != t;
      last_token[rank] = static_cast<std::int32_t>(t);
      body(t, k, id, rank, first);
    }
  }
}

std::int64_t count_bad_ids(const RouteView& route) {
  std::int64_t bad = 0;
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) bad += is_bad_id(route.id(t, k), route.E) ? 1 : 0;
  }
  return bad;
}

void index_rows_by_token(RoutePlan& plan) {
  plan.token_offsets.assign(static_cast<std::size_t>(plan.T) + 1, 0);
  for (const std::int32_t token : plan.row_token) ++plan.token_offsets[static_cast<std::size_t>(token) + 1];
  for (std::size_t t = 0; t < static_cast<std::size_t>(plan.T); ++t) plan.token_offsets[t + 1] += plan.token_offsets[t];
  plan.token_rows.resize(plan.row_token.size());
  std::vector<std::int64_t> cursor(plan.token_offsets.begin(), plan.token_offsets.end() - 1);
  for (std::size_t row = 0; row < plan.row_token.size(); ++row) {
    plan.token_rows[static_cast<std::size_t>(cursor[static_cast<std::size_t>(plan.row_token[row])]++)] = static_cast<std::int32_t>(row);
  }
}

}  // namespace

RoutePlan make_route_plan(const RouteView& route, const ExpertPlacement& placement) {
  WB_CHECK(route.E == placement.E, "the route has E = {} experts, the placement E = {}", route.E, placement.E);
  WB_CHECK(route.device.type == DeviceType::kCpu, "the route must be in host memory, it is on {}", to_string(route.device));
  WB_CHECK(route.K <= std::numeric_limits<std::int16_t>::max(), "a compact plan numbers the slots of a row in int16: K = {} is above 32767", route.K);
  WB_CHECK(route.T * route.K <= std::numeric_limits<std::int32_t>::max(), "T * K = {} slots of one rank exceed 2^31 - 1", route.T * route.K);
  const auto P = static_cast<std::size_t>(placement.P);
  RoutePlan plan;
  plan.T = route.T;
  plan.K = route.K;
  plan.P = placement.P;

  std::vector<std::int32_t> last_token(P);
  std::vector<std::int64_t> slot_cursor(P + 1, 0);
  plan.row_offsets.assign(P + 1, 0);
  for_each_slot(route, placement, last_token, [&](std::int64_t, std::int64_t, std::int32_t, std::size_t rank, bool first) {
    plan.row_offsets[rank + 1] += first ? 1 : 0;
    ++slot_cursor[rank + 1];
  });
  for (std::size_t p = 0; p < P; ++p) {
    plan.row_offsets[p + 1] += plan.row_offsets[p];
    slot_cursor[p + 1] += slot_cursor[p];
  }

  const auto rows = static_cast<std::size_t>(plan.row_offsets[P]);
  const auto slots = static_cast<std::size_t>(slot_cursor[P]);
  plan.row_token.resize(rows);
  plan.slot_offsets.resize(rows + 1);
  plan.slot_offsets[rows] = static_cast<std::int64_t>(slots);
  plan.slot_expert.resize(slots);
  plan.slot_weight.resize(slots);
  plan.slot_k.resize(slots);
  std::vector<std::int64_t> row_cursor(plan.row_offsets.begin(), plan.row_offsets.end() - 1);
  for_each_slot(route, placement, last_token, [&](std::int64_t t, std::int64_t k, std::int32_t id, std::size_t rank, bool first) {
    const auto slot = static_cast<std::size_t>(slot_cursor[rank]++);
    if (first) {
      const auto row = static_cast<std::size_t>(row_cursor[rank]++);
      plan.row_token[row] = static_cast<std::int32_t>(t);
      plan.slot_offsets[row] = static_cast<std::int64_t>(slot);
    }
    plan.slot_expert[slot] = static_cast<std::int32_t>(placement.local_of(id));
    plan.slot_weight[slot] = route.weights[t * route.K + k];
    plan.slot_k[slot] = static_cast<std::int16_t>(k);
  });
  index_rows_by_token(plan);
  if (plan.num_slots() != route.T * route.K) plan.num_bad_ids = count_bad_ids(route);
  return plan;
}

}  // namespace waybill
