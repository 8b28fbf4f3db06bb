// SPDX-License-Identifier: Apache-2.0
// Logits whose routes are those of a named load: what the router benchmark does with --load.
#pragma once

#include <span>
#include <string>

#include "bench_problem.h"
#include "waybill/router.h"

namespace waybill::cli {

inline constexpr const char* kRandomLoad = "random";  // --load of bench router: whatever random logits give

// The load's routes of one batch on one rank (W9 and recordings have their own number of tokens); an empty route (E = 0) for kRandomLoad.
Route router_load(const BenchOptions& options, const BenchShape& shape);

// Moves the values of each row of `logits` [T, E] so that the row's largest are those of its experts in `wanted`, in its order, with a gap that
// `dtype`, to which the caller rounds them, and the scores keep: standard normal logits stay standard normal up to these gaps, only their places
// change. Group-limited routing: the next largest go to the other experts of these experts' groups. A row with fewer than K routes has no other
// finite logit. Throws where no logits give the routes: a row of more groups than the router keeps (`load` and `shape` name it).
void give_routes(const RouterConfig& config, const RouteView& wanted, DType dtype, std::span<float> logits, const std::string& load, const std::string& shape);

// Throws with the first difference in the ids; slots without a route come last in what a router gives.
void expect_routes(const RouteView& seen, const RouteView& wanted, const std::string& load);

}  // namespace waybill::cli
