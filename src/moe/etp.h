// SPDX-License-Identifier: Apache-2.0
// Expert tensor parallelism: id e becomes t routes e t + j, one per slice of F; their partial outputs are summed.
// Worked example: E=4, P=4, t=2: experts 0,1 live on ranks {0,1}, experts 2,3 on ranks {2,3}; rank 1 holds slice 1 of experts 0
// and 1, that is the expanded ids 1 and 3 as its local experts 0 and 1.
#pragma once

#include <vector>

#include "waybill/route.h"

namespace waybill::moe {

// Rank and local index of every expanded id [E t].
void make_etp_tables(std::int64_t E, int P, int t, std::vector<std::int32_t>& rank_table, std::vector<std::int32_t>& local_table);

// route [T, K] over E -> expanded [T, K t] over E t; column k t + j holds slice j, with the weight of column k.
void expand_route(const RouteView& route, int t, Route& expanded);

// d_weights [T, K] = sum over slices of d_expanded [T, K t], in slice order.
void reduce_expanded(const float* d_expanded, std::int64_t T, std::int64_t K, int t, float* d_weights);

}  // namespace waybill::moe
