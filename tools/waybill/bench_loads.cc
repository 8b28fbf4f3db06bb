// SPDX-License-Identifier: Apache-2.0
#include "bench_loads.h"

#include <fmt/format.h>

#include <algorithm>

#include "waybill/route_stats.h"
#include "waybill/workload.h"

namespace waybill::cli {
namespace {

Extent extent_of(const std::vector<std::int64_t>& values) {
  if (values.empty()) return {};
  Extent extent{static_cast<double>(values.front()), 0, static_cast<double>(values.front())};
  for (const std::int64_t value : values) {
    extent.min = std::min(extent.min, static_cast<double>(value));
    extent.max = std::max(extent.max, static_cast<double>(value));
    extent.mean += static_cast<double>(value) / static_cast<double>(values.size());
  }
  return extent;
}

void add_to(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& values) {
  if (sum.empty()) sum.assign(values.size(), 0);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
}

}  // namespace

std::string load_names() {
  std::string names;
  for (int i = 0; i < kNumWorkloads; ++i) {
    const auto workload = static_cast<Workload>(i);
    names += fmt::format("{}{} {}", i == 0 ? "" : ", ", short_name(workload), to_string(workload));
  }
  return names;
}

std::vector<Route> make_load(const BenchOptions& options, const BenchShape& shape, std::int64_t step) {
  WorkloadConfig config;
  config.workload = parse_workload(options.load);
  config.seed = options.seed;
  config.step = step;
  config.K = shape.K;
  config.E = shape.E;
  config.T = config.workload == Workload::kFewRows ? few_rows_tokens(shape.E, shape.K) : shape.T * shape.P;
  return workload_routes(config, shape.P);
}

std::vector<RouteView> views_of(const std::vector<Route>& routes) {
  std::vector<RouteView> views;
  for (const Route& route : routes) views.push_back(route.view());
  return views;
}

LoadSummary summarise_load(const std::string& name, const std::vector<RouteView>& routes, std::int64_t alignment) {
  LoadSummary summary;
  summary.name = name;
  std::vector<std::int64_t> rank_rows, rank_slots, counts;
  for (const RouteView& route : routes) {
    const RouteStats stats = route_stats(route, block_placement(route.E, static_cast<int>(routes.size())));
    add_to(rank_rows, stats.rank_rows);
    add_to(rank_slots, stats.rank_slots);
    add_to(counts, stats.counts);
  }
  summary.rank_rows = extent_of(rank_rows);
  summary.rank_slots = extent_of(rank_slots);
  summary.expert_rows = extent_of(counts);
  for (const std::int64_t count : counts) {
    summary.real_rows += count;
    summary.padded_rows += (count + alignment - 1) / alignment * alignment;
  }
  return summary;
}

}  // namespace waybill::cli
