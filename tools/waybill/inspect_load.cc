// SPDX-License-Identifier: Apache-2.0
// Expert load of a run, by layer and by training phase: load over the mean, hottest experts, rank imbalance, recorded routes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>

#include "arguments.h"
#include "bench_loads.h"
#include "inspect_verbs.h"
#include "table.h"
#include "waybill/error.h"
#include "waybill/route_stats.h"

namespace waybill::cli {
namespace {

struct LayerLoad {
  std::vector<std::int64_t> counts, rank_slots;
  std::int64_t experts_per_bin = 1;  // layers with very many experts are recorded in equal bins
};

void add_to(std::vector<std::int64_t>& sum, const nlohmann::json& values) {
  if (!values.is_array() || values.empty()) WB_FAIL(ErrorCode::kIo, "the load of experts or ranks is {} instead of a list of counts", values.dump());
  if (sum.empty()) sum.assign(values.size(), 0);
  if (sum.size() != values.size()) WB_FAIL(ErrorCode::kIo, "the number of experts or ranks changes within the run ({} and {})", sum.size(), values.size());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    if (!values[i].is_number_integer()) WB_FAIL(ErrorCode::kIo, "a count of an expert or rank is {}", values[i].dump());
    sum[i] += values[i].get<std::int64_t>();
  }
}

double max_over_mean(const std::vector<std::int64_t>& values) {
  const auto total = static_cast<double>(std::accumulate(values.begin(), values.end(), std::int64_t{0}));
  return total > 0 ? static_cast<double>(*std::max_element(values.begin(), values.end())) * static_cast<double>(values.size()) / total : 0;
}

std::map<int, LayerLoad> sum_loads(const std::vector<nlohmann::json>& steps, std::size_t begin, std::size_t end) {
  std::map<int, LayerLoad> layers;
  for (std::size_t i = begin; i < end; ++i) {
    for (const nlohmann::json& layer : steps[i].value("layers", nlohmann::json::array())) {
      LayerLoad& load = layers[layer.at("layer").get<int>()];
      add_to(load.counts, layer.at("counts"));
      if (layer.contains("rank_slots")) add_to(load.rank_slots, layer["rank_slots"]);
    }
  }
  return layers;
}

// One character an expert: its load over the mean, ' ' for none, '9' for 4.5 times and more.
std::string load_strip(const std::vector<std::int64_t>& counts) {
  const double mean = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})) / static_cast<double>(counts.size());
  std::string strip;
  for (const std::int64_t count : counts) {
    const int level = mean > 0 ? static_cast<int>(2 * static_cast<double>(count) / mean) : 0;
    strip += count == 0 ? ' ' : static_cast<char>('0' + std::min(level, 9));
  }
  return strip;
}

// "3 (12.5%), 7 (9.1%)": the experts with the largest shares, ties by id.
std::string hottest(const std::vector<std::int64_t>& counts, int num_hot) {
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  std::vector<std::size_t> order(counts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&counts](std::size_t a, std::size_t b) { return counts[a] > counts[b]; });
  std::vector<std::string> hot;
  for (std::size_t i = 0; i < order.size() && static_cast<int>(i) < num_hot; ++i) {
    hot.push_back(fmt::format("{} ({:.1f}%)", order[i], total > 0 ? 100 * static_cast<double>(counts[order[i]]) / total : 0));
  }
  return fmt::format("{}", fmt::join(hot, ", "));
}

std::string ratio(const std::vector<std::int64_t>& values) { return values.empty() ? "" : fmt::format("{:.2f}", max_over_mean(values)); }

void print_layers(const std::map<int, LayerLoad>& layers, int num_hot) {
  Table table({"layer", "experts", "idle", "max/mean", "ranks max/mean", "hottest (share)"});
  for (const auto& [layer, load] : layers) {
    table.add({fmt::format("{}", layer), fmt::format("{}", load.counts.size()), fmt::format("{}", std::count(load.counts.begin(), load.counts.end(), 0)),
               ratio(load.counts), ratio(load.rank_slots), hottest(load.counts, num_hot)});
  }
  table.print(stdout);
  fmt::print("\nload of each expert in halves of the mean (2 = mean, blank = idle):\n");
  for (const auto& [layer, load] : layers) {
    if (load.counts.size() <= 160) fmt::print("layer {:>3} |{}|\n", layer, load_strip(load.counts));
  }
}

// The same over equal parts of the run: where imbalance began and whether it went away.
void print_phases(const std::vector<nlohmann::json>& steps, std::size_t phases, int num_hot) {
  Table table({"layer", "steps", "idle", "max/mean", "ranks max/mean", "busiest rank", "hottest (share)"});
  std::map<int, std::vector<std::vector<std::string>>> rows;
  for (std::size_t i = 0; i < phases; ++i) {
    const std::size_t begin = steps.size() * i / phases, end = steps.size() * (i + 1) / phases;
    if (begin == end) continue;
    const std::string range = fmt::format("{}-{}", steps[begin].value("step", std::int64_t{0}), steps[end - 1].value("step", std::int64_t{0}));
    for (const auto& [layer, load] : sum_loads(steps, begin, end)) {
      const auto busiest = std::max_element(load.rank_slots.begin(), load.rank_slots.end()) - load.rank_slots.begin();
      rows[layer].push_back({fmt::format("{}", layer), range, fmt::format("{}", std::count(load.counts.begin(), load.counts.end(), 0)), ratio(load.counts),
                             ratio(load.rank_slots), load.rank_slots.empty() ? "" : fmt::format("{}", busiest), hottest(load.counts, num_hot)});
    }
  }
  for (auto& [layer, lines] : rows) {
    for (std::vector<std::string>& line : lines) table.add(std::move(line));
  }
  fmt::print("\nby training phase:\n");
  table.print(stdout);
}

// Steps and layers whose routes were recorded: what a copy per rank instead of per expert saves, and the ranks' share of the rows.
void print_recorded(const std::string& folder) {
  std::vector<std::filesystem::path> places;
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder + "/routes", error)) {
    if (entry.path().filename() == "rank_000.route") places.push_back(entry.path().parent_path());
  }
  if (places.empty()) return;
  std::sort(places.begin(), places.end());
  Table table({"recorded routes", "ranks", "tokens", "max/mean", "ranks max/mean (rows)", "slots / rows"});
  for (const auto& place : places) {
    const std::vector<Route> routes = load_recorded("recorded:" + place.string());
    const ExpertPlacement placement =
        block_placement(routes[0].E(), routes[0].E() % static_cast<std::int64_t>(routes.size()) == 0 ? static_cast<int>(routes.size()) : 1);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(routes[0].E())), rows(static_cast<std::size_t>(placement.P));
    std::int64_t tokens = 0;
    for (const Route& route : routes) {
      const RouteStats stats = route_stats(route, placement);
      for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += stats.counts[e];
      for (std::size_t p = 0; p < rows.size(); ++p) rows[p] += stats.rank_rows[p];
      tokens += route.T();
    }
    const auto slots = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    const auto sent = static_cast<double>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
    table.add({std::filesystem::relative(place, folder + "/routes").string(), fmt::format("{}", routes.size()), fmt::format("{}", tokens), ratio(counts),
               ratio(rows), sent > 0 ? fmt::format("{:.2f}", slots / sent) : ""});
  }
  fmt::print("\n");
  table.print(stdout);
  fmt::print("replay one: waybill bench moe --load recorded:{}\n", places.back().string());
}

void run(const std::string& folder, std::int64_t last, std::int64_t phases, int num_hot) {
  const std::vector<nlohmann::json> steps = read_metrics(folder, "step");
  const std::size_t begin = last > 0 && static_cast<std::int64_t>(steps.size()) > last ? steps.size() - static_cast<std::size_t>(last) : 0;
  const auto layers = sum_loads(steps, begin, steps.size());
  if (layers.empty()) WB_FAIL(ErrorCode::kIo, "{}: no step of this run recorded expert loads", folder);
  fmt::print("the last {} of {} steps:\n", steps.size() - begin, steps.size());
  print_layers(layers, num_hot);
  if (phases > 0) print_phases(steps, static_cast<std::size_t>(phases), num_hot);
  print_recorded(folder);
  fmt::print("\nplots: PYTHONPATH=tools/report python3 -m waybill_report.load {}\n", folder);
}

}  // namespace

void register_inspect_load(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("load", "Expert load and rank imbalance of a run, by layer and training phase");
  struct Options {
    std::string folder;
    std::int64_t last = 100, phases = 4;
    int num_hot = 3;
  };
  auto options = std::make_shared<Options>();
  command->add_option("folder", options->folder, "run folder")->required();
  command->add_option("--last", options->last, "steps to sum over, from the end; 0 = all")->check(at_least(0))->capture_default_str();
  command->add_option("--phases", options->phases, "equal parts of the run to compare; 0 = none")->check(at_least(0))->capture_default_str();
  command->add_option("--hot", options->num_hot, "hottest experts to name")->check(at_least(0))->capture_default_str();
  command->callback([options] { read_fields(options->folder, [&] { run(options->folder, options->last, options->phases, options->num_hot); }); });
}

}  // namespace waybill::cli
