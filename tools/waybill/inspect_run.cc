// SPDX-License-Identifier: Apache-2.0
// A run folder in a few lines: where it stands, what it reached, where the time goes.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "inspect_verbs.h"
#include "table.h"
#include "waybill/error.h"

namespace waybill::cli {
namespace {

constexpr std::size_t kTail = 20;  // steps the speed is averaged over

double mean_of(const std::vector<nlohmann::json>& steps, const char* key) {
  double sum = 0;
  std::size_t count = 0;
  for (std::size_t i = steps.size() > kTail ? steps.size() - kTail : 0; i < steps.size(); ++i) {
    if (!steps[i].contains(key) || !steps[i][key].is_number()) continue;
    sum += steps[i][key].get<double>();
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

std::string phase_text(const std::vector<nlohmann::json>& steps) {
  std::vector<std::pair<std::string, double>> phases;
  double total = 0;
  const std::size_t begin = steps.size() > kTail ? steps.size() - kTail : 0;
  for (std::size_t i = begin; i < steps.size(); ++i) {
    const auto found = steps[i].find("phase_ms");
    if (found == steps[i].end()) continue;
    for (const auto& [name, value] : found->items()) {
      const double ms = value.get<double>() / static_cast<double>(steps.size() - begin);
      total += ms;
      const auto entry = std::find_if(phases.begin(), phases.end(), [&key = name](const auto& phase) { return phase.first == key; });
      if (entry == phases.end()) {
        phases.emplace_back(name, ms);
      } else {
        entry->second += ms;
      }
    }
  }
  if (phases.empty()) return "";
  std::sort(phases.begin(), phases.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  Table table({"phase", "ms/step", "share"});
  for (const auto& [name, ms] : phases) {
    if (ms > 0) table.add({name, fmt::format("{:.2f}", ms), fmt::format("{:.1f}%", total > 0 ? 100 * ms / total : 0)});
  }
  return fmt::format("time per phase, mean over ranks and the last {} steps:\n{}", steps.size() - begin, table.text());
}

// The recipes of the MoE layers, each once; empty for runs that did not record any.
std::string recipes_of(const nlohmann::json& header) {
  std::vector<std::string> names;
  for (const nlohmann::json& layer : header.value("layers", nlohmann::json::array())) {
    const std::string name = layer.value("recipe", "");
    if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void run(const std::string& folder, bool json) {
  const auto headers = read_metrics(folder, "header"), steps = read_metrics(folder, "step"), evals = read_metrics(folder, "eval"),
             ends = read_metrics(folder, "end");
  if (steps.empty()) WB_FAIL(ErrorCode::kIo, "{}: the run has no step yet", folder);
  const nlohmann::json header = headers.empty() ? nlohmann::json::object() : headers.back();
  nlohmann::json summary = {{"name", header.value("name", "")},
                            {"step", steps.back().at("step")},
                            {"loss", steps.back().at("loss")},
                            {"finished", !ends.empty()},
                            {"tokens_per_s", mean_of(steps, "tokens_per_s")},
                            {"step_ms", mean_of(steps, "step_ms")},
                            {"resumes", headers.empty() ? 0 : headers.size() - 1}};
  for (const char* key : {"unigram_entropy", "bigram_entropy", "parameters", "active_parameters", "world"}) {
    if (header.contains(key)) summary[key] = header[key];
  }
  if (const std::string recipes = recipes_of(header); !recipes.empty()) summary["recipe"] = recipes;
  if (!evals.empty()) summary["held_out_loss"] = evals.back().at("loss");
  if (json) {
    fmt::print("{}\n", summary.dump(2));
    return;
  }
  const std::string phases = phase_text(steps);  // before anything is printed: a damaged record is one line and nothing else
  for (const auto& [key, value] : summary.items()) fmt::print("{:<18} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
  fmt::print("{}", phases);
}

}  // namespace

void register_inspect_run(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("run", "Where a run stands: loss, speed, time per phase");
  struct Options {
    std::string folder;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("folder", options->folder, "run folder")->required();
  command->add_flag("--json", options->json, "as JSON");
  command->callback([options] { read_fields(options->folder, [&] { run(options->folder, options->json); }); });
}

}  // namespace waybill::cli
