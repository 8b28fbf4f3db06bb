// SPDX-License-Identifier: Apache-2.0
// The router of the dense designs: every expert's score is written out, and K passes over the row each take the maximum.
#pragma once

#include "waybill/router.h"

namespace waybill::baselines {

// route (ids, weights, counts) from logits [T, E] fp32; the same ids as router_forward. bias [E] or null. Padding masks, expert masks,
// replay, forced balance and normalise_epsilon are not part of it. slots_visited: += the scores the passes looked at.
void repeated_max_route(const RouterConfig& config, const TensorView& logits, const float* bias, const RouteView& route, std::int64_t& slots_visited,
                        Stream stream);

}  // namespace waybill::baselines
