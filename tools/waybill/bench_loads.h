// SPDX-License-Identifier: Apache-2.0
// The named loads of a benchmark as routes, and what a load looks like in numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench_problem.h"
#include "waybill/route.h"
#include "waybill/workload.h"

namespace waybill::cli {

// "W0 balanced, W1 zipf, ...": what --load takes, beside "recorded:FOLDER".
std::string load_names();

// Loads of a TOML file (bench/shapes/loads.toml); unknown keys and parameters out of range are refused with file and name.
struct NamedLoad {
  std::string name, about;
  WorkloadConfig config;  // T, K, E, seed and step are the caller's
};
std::vector<NamedLoad> load_loads(const std::string& path);

// --load recorded:FOLDER: the routes that `waybill train --record-routes` saved for one step and layer.
bool is_recorded(const std::string& load);
// rank_000.route, rank_001.route, ... of the folder. kIo where there is none or they disagree in K or E.
std::vector<Route> load_recorded(const std::string& load);
// Routes of all ranks; the same (load, seed, step) gives the same tokens at any P.
std::vector<Route> make_load(const BenchOptions& options, const BenchShape& shape, std::int64_t step = 0);

struct Extent {
  double min = 0, mean = 0, max = 0;
};
// Received rows per rank (deduplicated), slots per expert, slots without and with padding to `alignment`.
struct LoadSummary {
  std::string name;
  Extent rank_rows, rank_slots, expert_rows;
  std::int64_t real_rows = 0, padded_rows = 0;
};
LoadSummary summarise_load(const std::string& name, const std::vector<RouteView>& routes, std::int64_t alignment = 1);
std::vector<RouteView> views_of(const std::vector<Route>& routes);

}  // namespace waybill::cli
