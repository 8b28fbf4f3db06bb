// SPDX-License-Identifier: Apache-2.0
// Expert load of a run: per layer the load over the mean, the hottest experts and the rank imbalance.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "inspect_verbs.h"
#include "table.h"
#include "waybill/error.h"

namespace waybill::cli {
namespace {

struct LayerLoad {
  std::vector<std::int64_t> counts, rank_slots;
  std::int64_t experts_per_bin = 1;  // layers with very many experts are recorded in equal bins
};

void add_to(std::vector<std::int64_t>& sum, const nlohmann::json& values) {
  if (sum.empty()) sum.assign(values.size(), 0);
  if (sum.size() != values.size()) WB_FAIL(ErrorCode::kIo, "the number of experts or ranks changes within the run ({} and {})", sum.size(), values.size());
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i].get<std::int64_t>();
}

double max_over_mean(const std::vector<std::int64_t>& values) {
  const auto total = static_cast<double>(std::accumulate(values.begin(), values.end(), std::int64_t{0}));
  return total > 0 ? static_cast<double>(*std::max_element(values.begin(), values.end())) * static_cast<double>(values.size()) / total : 0;
}

std::map<int, LayerLoad> sum_loads(const std::vector<nlohmann::json>& steps, std::int64_t last) {
  std::map<int, LayerLoad> layers;
  const auto begin = last > 0 && static_cast<std::int64_t>(steps.size()) > last ? steps.size() - static_cast<std::size_t>(last) : 0;
  for (std::size_t i = begin; i < steps.size(); ++i) {
    for (const nlohmann::json& layer : steps[i].value("layers", nlohmann::json::array())) {
      LayerLoad& load = layers[layer.at("layer").get<int>()];
      add_to(load.counts, layer.at("counts"));
      load.experts_per_bin = layer.value("experts_per_bin", std::int64_t{1});
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

void run(const std::string& folder, std::int64_t last, int num_hot) {
  const auto layers = sum_loads(read_metrics(folder, "step"), last);
  if (layers.empty()) WB_FAIL(ErrorCode::kIo, "{}: no step of this run recorded expert loads", folder);
  Table table({"layer", "experts", "idle", "max/mean", "ranks max/mean", "hottest (share)"});
  for (const auto& [layer, load] : layers) {
    const std::vector<std::int64_t>& counts = load.counts;
    const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    std::vector<std::size_t> order(counts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&counts](std::size_t a, std::size_t b) { return counts[a] > counts[b]; });
    std::vector<std::string> hot;
    for (std::size_t i = 0; i < order.size() && static_cast<int>(i) < num_hot; ++i) {
      hot.push_back(fmt::format("{} ({:.1f}%)", static_cast<std::int64_t>(order[i]) * load.experts_per_bin,
                                total > 0 ? 100 * static_cast<double>(counts[order[i]]) / total : 0));
    }
    table.add({fmt::format("{}", layer), fmt::format("{}", static_cast<std::int64_t>(counts.size()) * load.experts_per_bin),
               fmt::format("{}", std::count(counts.begin(), counts.end(), 0)), fmt::format("{:.2f}", max_over_mean(counts)),
               load.rank_slots.empty() ? "" : fmt::format("{:.2f}", max_over_mean(load.rank_slots)), fmt::format("{}", fmt::join(hot, ", "))});
  }
  table.print(stdout);
  fmt::print("\nload of each expert in halves of the mean (2 = mean, blank = idle):\n");
  for (const auto& [layer, load] : layers) {
    if (load.counts.size() <= 160) fmt::print("layer {:>3} |{}|\n", layer, load_strip(load.counts));
  }
}

}  // namespace

void register_inspect_load(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("load", "Expert load and rank imbalance of a run, per layer");
  struct Options {
    std::string folder;
    std::int64_t last = 100;
    int num_hot = 3;
  };
  auto options = std::make_shared<Options>();
  command->add_option("folder", options->folder, "run folder")->required();
  command->add_option("--last", options->last, "steps to sum over, from the end; 0 = all")->capture_default_str();
  command->add_option("--hot", options->num_hot, "hottest experts to name")->capture_default_str();
  command->callback([options] { run(options->folder, options->last, options->num_hot); });
}

}  // namespace waybill::cli
