// SPDX-License-Identifier: Apache-2.0
// Routes: validity and statistics; synthetic ones.
#include <algorithm>

#include "convert.h"
#include "waybill/route_stats.h"
#include "waybill/workload.h"

using namespace waybill;
using namespace waybill::capi;

wb_status wb_route_validate(const wb_route* route, uint32_t allow) noexcept {
  return guarded([&] {
    const auto known = static_cast<std::uint32_t>(WB_ROUTE_ALLOW_OUT_OF_RANGE) | static_cast<std::uint32_t>(WB_ROUTE_ALLOW_DUPLICATES);
    WB_CHECK((allow & ~known) == 0, "allow is {}, known bits are {}", allow, known);
    RouteCheck check;
    check.allow_out_of_range = (allow & WB_ROUTE_ALLOW_OUT_OF_RANGE) != 0;
    check.allow_duplicates = (allow & WB_ROUTE_ALLOW_DUPLICATES) != 0;
    validate(to_route(route, "route"), check);
  });
}

wb_status wb_route_get_stats(const wb_route* route, int32_t P, wb_route_stats* stats) noexcept {
  return guarded([&] {
    const RouteView view = to_route(route, "route");
    const RouteStats source = route_stats(view, block_placement(view.E, P));
    wb_route_stats result{};
    result.num_routes = source.num_routes;
    result.experts_min = source.min_count;
    result.experts_max = source.max_count;
    result.hottest_expert = source.hottest.empty() ? -1 : source.hottest.front().expert;
    result.experts_mean = source.mean_count;
    result.entropy = source.entropy;
    result.rows_min = *std::min_element(source.rank_rows.begin(), source.rank_rows.end());
    result.rows_max = *std::max_element(source.rank_rows.begin(), source.rank_rows.end());
    std::int64_t rows = 0;
    for (const std::int64_t count : source.rank_rows) rows += count;
    result.rows_mean = static_cast<double>(rows) / static_cast<double>(P);
    write_struct(stats, result, "stats");
  });
}

wb_status wb_workload_ids(const char* workload, uint64_t seed, int64_t step, int64_t T, int64_t K, int64_t E, int32_t P, int32_t* ids,
                          int64_t* row_bounds) noexcept {
  return guarded([&] {
    WB_CHECK(workload != nullptr, "workload must not be null");
    WorkloadConfig config;
    config.workload = parse_workload(workload), config.seed = seed, config.step = step, config.T = T, config.K = K, config.E = E;
    validate(config);
    WB_CHECK(ids != nullptr || T == 0, "ids must not be null where T = {}", T);
    const std::vector<std::int64_t> bounds = workload_bounds(config, P);
    const std::vector<std::int32_t> result = workload_ids(config);
    std::copy(result.begin(), result.end(), ids);
    if (row_bounds != nullptr) std::copy(bounds.begin(), bounds.end(), row_bounds);
  });
}

wb_status wb_workload_tokens(const char* workload, int64_t T, int64_t K, int64_t E, int64_t* tokens) noexcept {
  return guarded([&] {
    WB_CHECK(workload != nullptr && tokens != nullptr, "workload and tokens must not be null");
    WorkloadConfig config;
    config.workload = parse_workload(workload), config.T = T, config.K = K, config.E = E;
    if (config.workload == Workload::kFewRows && E <= INT32_MAX) config.T = few_rows_tokens(E, K);
    validate(config);
    *tokens = config.T;
  });
}
