// SPDX-License-Identifier: Apache-2.0
#include "route/route_plan_ref.h"

namespace waybill::reference {

RoutePlan make_route_plan(const RouteView& route, const ExpertPlacement& placement) {
  RoutePlan plan;
  plan.T = route.T;
  plan.K = route.K;
  plan.P = placement.P;
  plan.row_offsets = {0};
  plan.slot_offsets = {0};
  for (int p = 0; p < placement.P; ++p) {
    for (std::int64_t t = 0; t < route.T; ++t) {
      for (std::int64_t k = 0; k < route.K; ++k) {
        const std::int32_t id = route.id(t, k);
        if (id < 0 || id >= route.E || placement.rank_of(id) != p) continue;
        plan.slot_expert.push_back(static_cast<std::int32_t>(placement.local_of(id)));
        plan.slot_weight.push_back(route.weights[t * route.K + k]);
        plan.slot_k.push_back(static_cast<std::int16_t>(k));
      }
      if (plan.num_slots() == plan.slot_offsets.back()) continue;
      plan.row_token.push_back(static_cast<std::int32_t>(t));
      plan.slot_offsets.push_back(plan.num_slots());
    }
    plan.row_offsets.push_back(plan.num_rows());
  }
  plan.token_offsets = {0};
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t row = 0; row < plan.num_rows(); ++row) {
      if (plan.row_token[static_cast<std::size_t>(row)] == t) plan.token_rows.push_back(static_cast<std::int32_t>(row));
    }
    plan.token_offsets.push_back(static_cast<std::int64_t>(plan.token_rows.size()));
    for (std::int64_t k = 0; k < route.K; ++k) plan.num_bad_ids += route.id(t, k) < -1 || route.id(t, k) >= route.E ? 1 : 0;
  }
  return plan;
}

ReceiveLayout make_receive_layout(int P, std::int64_t L, std::vector<std::int64_t> row_offsets, std::vector<std::int64_t> row_slot_offsets,
                                  const std::int32_t* slot_expert, const float* slot_weight, std::int64_t alignment) {
  ReceiveLayout layout;
  layout.P = P;
  layout.L = L;
  layout.row_offsets = std::move(row_offsets);
  layout.row_slot_offsets = std::move(row_slot_offsets);
  layout.slot_position.resize(static_cast<std::size_t>(layout.S()));
  layout.expert_offsets = {0};
  for (std::int64_t e = 0; e < L; ++e) {
    std::int32_t count = 0;
    for (std::int64_t r = 0; r < layout.R(); ++r) {
      for (std::int64_t j = layout.row_slot_offsets[static_cast<std::size_t>(r)]; j < layout.row_slot_offsets[static_cast<std::size_t>(r) + 1]; ++j) {
        if (slot_expert[j] != e) continue;
        layout.slot_position[static_cast<std::size_t>(j)] = layout.S_padded();
        layout.slot_row.push_back(static_cast<std::int32_t>(r));
        layout.slot_weight.push_back(slot_weight[j]);
        ++count;
      }
    }
    layout.expert_counts.push_back(count);
    while (layout.S_padded() % alignment != 0) {
      layout.slot_row.push_back(-1);
      layout.slot_weight.push_back(0.0f);
    }
    layout.expert_offsets.push_back(static_cast<std::int32_t>(layout.S_padded()));
  }
  return layout;
}

}  // namespace waybill::reference
