// SPDX-License-Identifier: Apache-2.0
// Sizes of a model from its config alone: parameters, floating-point operations a token, memory a rank.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "arguments.h"
#include "inspect_verbs.h"
#include "table.h"
#include "waybill/model_math.h"
#include "waybill/train_config.h"

namespace waybill::cli {
namespace {

struct ModelOptions {
  std::string config;
  std::vector<std::string> overrides;
  int P = 0, D = 0;
  std::int64_t tokens = 0;
  std::string precision = "fp32";
  bool json = false;
};

std::string billions(double count) {
  if (count >= 1e9) return fmt::format("{:.3f} B", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.3f} M", count / 1e6);
  return fmt::format("{:.0f}", count);
}

// What is printed: the model as the run spreads it.
struct Inspected {
  ArchitectureConfig model;
  MemoryPlan plan;
  int P = 1, D = 1;
  std::vector<std::string> counted_only;  // settings that this engine does not train
};

Inspected inspect(const ModelOptions& options, const RunConfig& run) {
  Inspected i;
  i.model = architecture_of(run);
  validate(i.model);
  i.counted_only = counted_only_settings(run);
  i.P = options.P > 0 ? options.P : run.parallel.P;
  i.D = options.D > 0 ? options.D : run.parallel.D;
  if (options.P > 0) {
    for (LayerShape& layer : i.model.layers) layer.P = options.P;
  }
  const std::int64_t sequences = std::max<std::int64_t>(run.train.global_batch / std::max<std::int64_t>(run.train.micro_batches * i.P * i.D, 1), 1);
  i.plan.tokens_per_rank = options.tokens > 0 ? options.tokens : sequences * run.model.seq_len;
  if (options.precision == "bf16") {  // fp32 gradients, master weights and moments
    i.plan.weight_bytes = 2;
    i.plan.optimizer_bytes = 12;
    i.plan.activation_bytes = 2;
  }
  memory_per_rank(i.model, i.plan);  // refuses ranks that do not divide the experts while nothing is printed yet
  return i;
}

// Names of the MoE layers' recipes, each once, in layer order.
std::string recipes(const ArchitectureConfig& model) {
  std::vector<std::string> names;
  for (const LayerShape& layer : model.layers) {
    if (layer.is_moe && std::find(names.begin(), names.end(), to_string(layer.recipe)) == names.end()) names.emplace_back(to_string(layer.recipe));
  }
  return names.empty() ? to_string(Recipe::kF32) : fmt::format("{}", fmt::join(names, " and "));
}

std::string describe(const ArchitectureConfig& model, const LayerShape& layer) {
  const AttentionShape& a = model.attention;
  std::string text = layer.is_delta_net              ? "gated delta net"
                     : a.kind == AttentionKind::kMLA ? "multi-head latent attention"
                     : a.output_gate                 ? "grouped-query attention with output gate"
                                                     : "grouped-query attention";
  if (!layer.is_moe) return text + fmt::format(", dense F={}", layer.dense_F);
  text += fmt::format(", E={} K={} F={}", layer.E, layer.K, layer.F);
  if (layer.latent > 0) text += fmt::format(" latent={}", layer.latent);
  if (layer.shared_F > 0) text += fmt::format(", shared F={}{}", layer.shared_F, layer.shared_gate ? " with gate" : "");
  return text + fmt::format(", P={}", layer.P);
}

// Layers of one shape once, with their number, in the order in which the shapes first appear.
void print_layers(const ArchitectureConfig& model) {
  std::vector<std::pair<LayerShape, int>> kinds;
  for (const LayerShape& layer : model.layers) {
    const auto it = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) { return kind.first == layer; });
    if (it == kinds.end())
      kinds.emplace_back(layer, 1);
    else
      ++it->second;
  }
  const auto num_moe = std::count_if(model.layers.begin(), model.layers.end(), [](const LayerShape& layer) { return layer.is_moe; });
  fmt::print("{}: {} layers ({} MoE), H={}\n", model.name, model.layers.size(), num_moe, model.H);
  for (const auto& [layer, count] : kinds) fmt::print("  {} x {}\n", count, describe(model, layer));
}

nlohmann::json to_json(const Inspected& i) {
  const ArchitectureConfig& model = i.model;
  const ParameterCounts count = count_parameters(model);
  const TokenFlops flops = flops_per_token(model);
  const MemoryEstimate memory = memory_per_rank(model, i.plan);
  return {{"name", model.name},
          {"trained_by_this_engine", i.counted_only.empty()},
          {"counted_only", i.counted_only},
          {"parameters",
           {{"total", count.total()},
            {"active", count.active()},
            {"embedding", count.embedding},
            {"head", count.head},
            {"attention", count.attention},
            {"delta_net", count.delta_net},
            {"dense", count.dense},
            {"norms", count.norms},
            {"router", count.router},
            {"latent", count.latent},
            {"shared", count.shared},
            {"experts", count.experts},
            {"active_experts", count.active_experts},
            {"mtp", count.mtp}}},
          {"flops_per_token",
           {{"total", flops.total()},
            {"linear", flops.linear},
            {"head", flops.head},
            {"attention", flops.attention},
            {"delta_net", flops.delta_net},
            {"mtp", flops.mtp},
            {"router", flops.router}}},
          {"seq_len", model.seq_len},
          {"memory_per_rank",
           {{"P", i.P},
            {"D", i.D},
            {"tokens", i.plan.tokens_per_rank},
            {"parameters", memory.parameters},
            {"total", memory.total()},
            {"weights", memory.weights},
            {"gradients", memory.gradients},
            {"optimizer", memory.optimizer},
            {"activations", memory.activations},
            {"receive_window", memory.receive_window},
            {"logits", memory.logits},
            {"recipe", recipes(model)},
            {"operands", memory.operands}}}};
}

void print_parameters(const ArchitectureConfig& model) {
  const ParameterCounts count = count_parameters(model);
  Table table({"part", "parameters"});
  const std::pair<const char*, std::int64_t> parts[] = {
      {"embedding", count.embedding}, {"head", count.head},      {"attention", count.attention}, {"gated delta nets", count.delta_net},
      {"dense", count.dense},         {"norms", count.norms},    {"router", count.router},       {"latent", count.latent},
      {"shared", count.shared},       {"experts", count.experts}};
  for (const auto& [name, value] : parts) {
    if (value > 0) table.add({name, billions(static_cast<double>(value))});
  }
  table.print(stdout);
  fmt::print("total {}, active a token {}", billions(static_cast<double>(count.total())), billions(static_cast<double>(count.active())));
  if (count.mtp > 0) fmt::print(" (and {} in multi-token prediction)", billions(static_cast<double>(count.mtp)));
  fmt::print("\n");
}

void print_memory(const Inspected& i, const std::string& precision) {
  const MemoryEstimate memory = memory_per_rank(i.model, i.plan);
  fmt::print("\nmemory of one rank (model), {} training, P={} D={}, {} tokens a micro-batch, balanced load:\n", precision, i.P, i.D, i.plan.tokens_per_rank);
  Table table({"what", "bytes"});
  table.add({"weights", format_bytes(memory.weights)});
  table.add({"gradients", format_bytes(memory.gradients)});
  table.add({"optimizer", format_bytes(memory.optimizer)});
  table.add({"activations", format_bytes(memory.activations)});
  table.add({"receive window", format_bytes(memory.receive_window)});
  table.add({"logits", format_bytes(memory.logits)});
  if (memory.operands > 0) table.add({fmt::format("{} operands", recipes(i.model)), format_bytes(memory.operands)});
  table.add({"total", format_bytes(memory.total())});
  table.print(stdout);
}

void run(const ModelOptions& options) {
  const Inspected i = inspect(options, load_run_config(options.config, options.overrides));
  if (options.json) {
    fmt::print("{}\n", to_json(i).dump(2));
    return;
  }
  print_layers(i.model);
  print_parameters(i.model);
  const TokenFlops flops = flops_per_token(i.model);
  const auto part = [](const char* name, double count) { return count > 0 ? fmt::format(", {} {:.4g}", name, count / 1e9) : ""; };
  fmt::print("{:.4g} GFLOP a token, forward and backward at {} tokens a sequence (linear {:.4g}, head {:.4g}{}{}{}; router {:.3g} beside it)\n",
             flops.total() / 1e9, i.model.seq_len, flops.linear / 1e9, flops.head / 1e9, part("attention", flops.attention),
             part("gated delta nets", flops.delta_net), part("multi-token prediction", flops.mtp), flops.router / 1e9);
  print_memory(i, options.precision);
  if (!i.counted_only.empty()) fmt::print("\ncounted only, this engine does not train it: {}\n", fmt::join(i.counted_only, ", "));
}

}  // namespace

void register_inspect_model(CLI::App& inspect) {
  CLI::App* model = inspect.add_subcommand("model", "Parameters, GFLOP a token and memory a rank of a config");
  auto options = std::make_shared<ModelOptions>();
  model->add_option("config", options->config, "TOML file")->required();
  model->add_option("--set", options->overrides, "section.key=value, repeatable");
  model->add_option("-P,--ranks", options->P, "expert-parallel ranks (default: the config's)")->check(at_least(1));
  model->add_option("-D,--replicas", options->D, "replicas of an expert (default: the config's)")->check(at_least(1));
  model->add_option("-T,--tokens", options->tokens, "tokens of a micro-batch on one rank (default: the config's)")->check(at_least(1));
  model->add_option("--precision", options->precision, "of training")->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  model->add_flag("--json", options->json, "as JSON");
  model->callback([options] { run(*options); });
}

}  // namespace waybill::cli
