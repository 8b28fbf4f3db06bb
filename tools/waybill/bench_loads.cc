// SPDX-License-Identifier: Apache-2.0
#include "bench_loads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>

#include "waybill/route_io.h"
#include "waybill/route_stats.h"

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

// A parameter of a load where the table has one; integers are numbers, too.
void read_number(const toml::table& table, const char* key, double& value, const std::string& path, const std::string& name) {
  if (!table.contains(key)) return;
  WB_CHECK(table[key].is_number(), "{}: load {}: {} must be a number", path, name, key);
  value = *table[key].value<double>();
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

std::vector<NamedLoad> load_loads(const std::string& path) {
  constexpr const char* kKeys[] = {"name", "workload", "about", "zipf_exponent", "hot_factor", "hot_share"};
  toml::table file;
  try {
    file = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    WB_FAIL(ErrorCode::kIo, "{}:{}: {}", path, error.source().begin.line, error.description());
  }
  const toml::array* list = file["load"].as_array();
  WB_CHECK(list != nullptr && !list->empty(), "{}: no [[load]]", path);
  std::vector<NamedLoad> loads;
  for (const toml::node& node : *list) {
    WB_CHECK(node.is_table(), "{}: [[load]] must be a table", path);
    const toml::table& table = *node.as_table();
    NamedLoad load;
    load.name = table["name"].value_or(std::string());
    WB_CHECK(!load.name.empty(), "{}: a load without a name", path);
    WB_CHECK(std::none_of(loads.begin(), loads.end(), [&](const NamedLoad& other) { return other.name == load.name; }), "{}: two loads are named {}", path,
             load.name);
    for (const auto& [key, value] : table) {
      WB_CHECK(std::find(std::begin(kKeys), std::end(kKeys), key.str()) != std::end(kKeys), "{}: load {}: unknown key '{}', known are {}", path, load.name,
               key.str(), fmt::join(kKeys, ", "));
    }
    load.about = table["about"].value_or(std::string());
    load.config.workload = parse_workload(table["workload"].value_or(std::string()));
    read_number(table, "zipf_exponent", load.config.zipf_exponent, path, load.name);
    read_number(table, "hot_factor", load.config.hot_factor, path, load.name);
    read_number(table, "hot_share", load.config.hot_share, path, load.name);
    loads.push_back(load);
  }
  return loads;
}

bool is_recorded(const std::string& load) { return load.rfind("recorded:", 0) == 0; }

std::vector<Route> load_recorded(const std::string& load) { return load_routes(load.substr(std::string("recorded:").size())); }

std::vector<Route> make_load(const BenchOptions& options, const BenchShape& shape, std::int64_t step) {
  if (is_recorded(options.load)) return split_routes(load_recorded(options.load), shape.P);
  const std::string path = options.loads_file.empty() ? shared_file("loads.toml", "--loads") : options.loads_file;
  std::vector<std::string> names;
  for (const NamedLoad& load : load_loads(path)) {
    names.push_back(fmt::format("{} ({})", load.name, to_string(load.config.workload)));
    if (options.load != load.name && options.load != to_string(load.config.workload)) continue;
    WorkloadConfig config = load.config;
    config.seed = options.seed;
    config.step = step;
    config.K = shape.K;
    config.E = shape.E;
    config.T = config.workload == Workload::kFewRows ? few_rows_tokens(shape.E, shape.K) : shape.T * shape.P;
    return workload_routes(config, shape.P);
  }
  WB_FAIL(ErrorCode::kInvalidArgument, "no load '{}' in {}, known are {}; or recorded:FOLDER", options.load, path, fmt::join(names, ", "));
}

std::vector<RouteView> views_of(const std::vector<Route>& routes) {
  std::vector<RouteView> views;
  views.reserve(routes.size());
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
