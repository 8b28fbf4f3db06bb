// SPDX-License-Identifier: Apache-2.0
// A route file: load per expert and rank, the plan for P ranks, and the first tokens.
#include <fmt/format.h>

#include <memory>

#include "arguments.h"
#include "inspect_verbs.h"
#include "waybill/route_io.h"
#include "waybill/route_plan.h"
#include "waybill/route_stats.h"

namespace waybill::cli {
namespace {

struct RouteOptions {
  std::string file;
  int P = 1;
  std::int64_t rows = 8;
  bool json = false;
};

nlohmann::json to_json(const RouteStats& stats) {
  nlohmann::json hottest = nlohmann::json::array();
  for (const HotExpert& hot : stats.hottest) hottest.push_back({{"expert", hot.expert}, {"count", hot.count}});
  return {{"T", stats.T},
          {"K", stats.K},
          {"E", stats.E},
          {"P", stats.P},
          {"num_routes", stats.num_routes},
          {"num_empty_tokens", stats.num_empty_tokens},
          {"num_bad_ids", stats.num_bad_ids},
          {"counts", stats.counts},
          {"min_count", stats.min_count},
          {"max_count", stats.max_count},
          {"mean_count", stats.mean_count},
          {"num_idle_experts", stats.num_idle_experts},
          {"entropy", stats.entropy},
          {"hottest", hottest},
          {"rank_rows", stats.rank_rows},
          {"rank_slots", stats.rank_slots},
          {"expert_imbalance", stats.expert_imbalance()},
          {"rank_imbalance", stats.rank_imbalance()},
          {"dedup_gain", stats.dedup_gain()}};
}

void run(const RouteOptions& options) {
  const Route route = load_route(options.file);
  const ExpertPlacement placement = block_placement(route.E(), options.P);
  const RouteStats stats = route_stats(route.view(), placement);
  if (options.json) {
    fmt::print("{}\n", to_json(stats).dump(2));
    return;
  }
  fmt::print("{}\n", describe(stats));
  if (options.P > 1) {
    const RoutePlan plan = make_route_plan(route.view(), placement);
    validate(plan, placement);
    fmt::print("\n{}\n", describe(plan));
  }
  fmt::print("\n{}\n", describe(route.view(), options.rows));
}

}  // namespace

void register_inspect_route(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("route", "Load per expert and rank of a route file");
  auto options = std::make_shared<RouteOptions>();
  command->add_option("file", options->file, "route file (waybill bench router --save-route writes one)")->required();
  command->add_option("-P,--ranks", options->P, "ranks to spread the experts over")->check(at_least(1))->capture_default_str();
  command->add_option("--rows", options->rows, "tokens to list")->check(at_least(0))->capture_default_str();
  command->add_flag("--json", options->json, "statistics as JSON");
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
