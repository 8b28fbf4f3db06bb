// SPDX-License-Identifier: Apache-2.0
// The definitions of plan and layout as shortest loops: by destination, token, k and by expert, slot.
#pragma once

#include "waybill/route_plan.h"

namespace waybill::reference {

RoutePlan make_route_plan(const RouteView& route, const ExpertPlacement& placement);
ReceiveLayout make_receive_layout(int P, std::int64_t L, std::vector<std::int64_t> row_offsets, std::vector<std::int64_t> row_slot_offsets,
                                  const std::int32_t* slot_expert, const float* slot_weight, std::int64_t alignment);

}  // namespace waybill::reference
