// SPDX-License-Identifier: Apache-2.0
// Capacity-based routing, the older alternative to dropless: every expert takes a fixed number of routes from each rank.
#pragma once

#include "waybill/route_plan.h"

namespace waybill::moe {

// ceil(factor * T * K / E), at most all T * K: routes an expert takes from a rank that brings T tokens.
std::int64_t expert_capacity(double factor, std::int64_t T, std::int64_t K, std::int64_t E);

// kept = route without the routes beyond capacity: those become id -1, weight 0; the other weights stay. First choices go before
// second choices, earlier tokens before later ones. Returns how many were dropped.
std::int64_t drop_over_capacity(const RouteView& route, std::int64_t capacity, Route& kept);

// Every local expert gets exactly `slots_per_expert` slots: the layout's own, then padding slots.
void pad_to_capacity(ReceiveLayout& layout, std::int64_t slots_per_expert);

}  // namespace waybill::moe
