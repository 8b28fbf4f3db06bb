// SPDX-License-Identifier: Apache-2.0
// waybill inspect memory: the bytes that a run of a config will hold at most, on a rank of a CPU and on a GPU, before anything is allocated. The run's
// metrics hold the measured peak next to the prediction (peak_bytes, predicted_bytes).
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <utility>

#include "inspect_verbs.h"
#include "table.h"
#include "waybill/error.h"
#include "waybill/trainer.h"

namespace waybill::cli {
namespace {

struct MemoryOptions {
  std::string config;
  std::vector<std::string> overrides;
  bool json = false;
};

using Parts = std::vector<std::pair<const char*, double>>;

Parts parts_of(const MemoryEstimate& m) {
  return {{"weights", m.weights},
          {"gradients", m.gradients},
          {"optimizer", m.optimizer},
          {"activations", m.activations},
          {"receive_window", m.receive_window},
          {"logits_and_tokens", m.logits},
          {"operands", m.operands},
          {"scratch", m.scratch},
          {"total", m.total() + m.scratch}};
}
Parts parts_of(const GpuMemoryEstimate& m) {
  return {{"weights", m.weights},         {"gradients", m.gradients}, {"optimizer", m.optimizer}, {"activations", m.activations},
          {"moe_windows", m.moe_windows}, {"moe_steps", m.moe_steps}, {"scratch", m.scratch},     {"total", m.total()}};
}

nlohmann::json to_json(const Parts& parts) {
  nlohmann::json out = nlohmann::json::object();
  for (const auto& [name, bytes] : parts) out[name] = static_cast<std::int64_t>(bytes);
  return out;
}

void print(const std::string& title, const Parts& parts) {
  fmt::print("{}\n", title);
  Table table({"what", "bytes"});
  for (const auto& [name, bytes] : parts) {
    if (bytes > 0) table.add({name, format_bytes(bytes)});
  }
  table.print(stdout);
}

void run(const MemoryOptions& options) {
  const RunConfig config = load_run_config(options.config, options.overrides);
  const std::vector<std::string> counted_only = counted_only_settings(config);
  WB_CHECK(counted_only.empty(), "{}: the engine does not train {}; `waybill inspect model` estimates its memory", config.name, fmt::join(counted_only, ", "));
  validate(config);
  const int W = config.parallel.W();
  const Parts cpu = parts_of(cpu_memory(config));
  std::optional<GpuMemoryEstimate> gpu, smallest;
  std::string why_not;
  try {
    gpu = gpu_memory(config), smallest = gpu_memory(config, /*is_smallest=*/true);
  } catch (const Error& error) {
    why_not = error.what();
  }
  if (options.json) {
    nlohmann::json out = {{"name", config.name}, {"ranks", W}, {"cpu_rank", to_json(cpu)}, {"gpu", nullptr}};
    if (gpu) {
      out["gpu"] = to_json(parts_of(*gpu));
      out["gpu"]["ranks"] = gpu->num_ranks;
      out["gpu"]["least_total"] = static_cast<std::int64_t>(smallest->total());
    } else {
      out["gpu_refused"] = why_not;
    }
    fmt::print("{}\n", out.dump(2));
    return;
  }
  print(fmt::format("{}: peak bytes of one of {} rank(s) on the CPU (prediction; balanced load, in captured mode the budgets)", config.name, W), cpu);
  if (!gpu) {
    fmt::print("\non GPUs: {}\n", why_not);
    return;
  }
  print(fmt::format("\npeak bytes of one of {} GPU(s), {} rank(s) each (prediction; context and kernels come on top)", config.train.gpus, gpu->num_ranks),
        parts_of(*gpu));
  if (smallest->total() < gpu->total()) {
    fmt::print("where that does not fit, MoE layers send rows again and work in blocks of columns, with the same results: down to {}\n",
               format_bytes(smallest->total()));
  }
}

}  // namespace

void register_inspect_memory(CLI::App& inspect) {
  CLI::App* command = inspect.add_subcommand("memory", "Predicted peak memory of a run, on a rank of a CPU and on a GPU");
  auto options = std::make_shared<MemoryOptions>();
  command->add_option("config", options->config, "TOML file")->required();
  command->add_option("--set", options->overrides, "section.key=value, repeatable");
  command->add_flag("--json", options->json, "as JSON");
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
