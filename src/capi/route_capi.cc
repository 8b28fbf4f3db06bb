// SPDX-License-Identifier: Apache-2.0
// Routes: validity and statistics.
#include <algorithm>

#include "convert.h"
#include "waybill/route_stats.h"

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
