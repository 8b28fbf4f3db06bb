// SPDX-License-Identifier: Apache-2.0
// Sizes of a model from its config alone: parameters, floating-point operations a token, memory a rank.
#include <fmt/format.h>

#include <memory>

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

// Bytes a parameter: fp32 everything, or bf16 weights with fp32 gradients, master weights and moments.
MemoryPlan memory_plan(const ModelOptions& options, const RunConfig& run) {
  MemoryPlan plan;
  plan.P = options.P > 0 ? options.P : run.parallel.P;
  plan.D = options.D > 0 ? options.D : run.parallel.D;
  const std::int64_t sequences = std::max<std::int64_t>(run.train.global_batch / std::max<std::int64_t>(run.train.micro_batches * plan.P * plan.D, 1), 1);
  plan.tokens_per_rank = options.tokens > 0 ? options.tokens : sequences * run.model.seq_len;
  plan.recompute = run.layer.moe.recompute;
  plan.recipe = run.layer.moe.recipe.kind;
  if (options.precision == "bf16") {
    plan.weight_bytes = 2;
    plan.optimizer_bytes = 12;
    plan.activation_bytes = 2;
  }
  return plan;
}

nlohmann::json to_json(const ArchitectureConfig& model, const MemoryPlan& plan) {
  const ParameterCounts count = count_parameters(model);
  const TokenFlops flops = flops_per_token(model);
  const MemoryEstimate memory = memory_per_rank(model, plan);
  return {{"name", model.name},
          {"parameters",
           {{"total", count.total()},
            {"active", count.active()},
            {"embedding", count.embedding},
            {"head", count.head},
            {"attention", count.attention},
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
            {"mtp", flops.mtp},
            {"router", flops.router}}},
          {"seq_len", model.seq_len},
          {"memory_per_rank",
           {{"P", plan.P},
            {"D", plan.D},
            {"tokens", plan.tokens_per_rank},
            {"parameters", memory.parameters},
            {"total", memory.total()},
            {"weights", memory.weights},
            {"gradients", memory.gradients},
            {"optimizer", memory.optimizer},
            {"activations", memory.activations},
            {"receive_window", memory.receive_window},
            {"logits", memory.logits},
            {"recipe", to_string(plan.recipe)},
            {"operands", memory.operands}}}};
}

void print_parameters(const ArchitectureConfig& model) {
  const ParameterCounts count = count_parameters(model);
  Table table({"part", "parameters"});
  const std::pair<const char*, std::int64_t> parts[] = {{"embedding", count.embedding}, {"head", count.head},     {"attention", count.attention},
                                                        {"dense", count.dense},         {"norms", count.norms},   {"router", count.router},
                                                        {"latent", count.latent},       {"shared", count.shared}, {"experts", count.experts}};
  for (const auto& [name, value] : parts) {
    if (value > 0) table.add({name, billions(static_cast<double>(value))});
  }
  table.print(stdout);
  fmt::print("total {}, active a token {}", billions(static_cast<double>(count.total())), billions(static_cast<double>(count.active())));
  if (count.mtp > 0) fmt::print(" (and {} in multi-token prediction)", billions(static_cast<double>(count.mtp)));
  fmt::print("\n");
}

void print_memory(const ArchitectureConfig& model, const MemoryPlan& plan, const std::string& precision) {
  const MemoryEstimate memory = memory_per_rank(model, plan);
  fmt::print("\nmemory of one rank (model), {} training, P={} D={}, {} tokens a micro-batch, balanced load:\n", precision, plan.P, plan.D,
             plan.tokens_per_rank);
  Table table({"what", "bytes"});
  table.add({"weights", format_bytes(memory.weights)});
  table.add({"gradients", format_bytes(memory.gradients)});
  table.add({"optimizer", format_bytes(memory.optimizer)});
  table.add({"activations", format_bytes(memory.activations)});
  table.add({"receive window", format_bytes(memory.receive_window)});
  table.add({"logits", format_bytes(memory.logits)});
  if (plan.recipe != Recipe::kF32) table.add({fmt::format("{} operands", to_string(plan.recipe)), format_bytes(memory.operands)});
  table.add({"total", format_bytes(memory.total())});
  table.print(stdout);
}

void run(const ModelOptions& options) {
  const RunConfig run_config = load_run_config(options.config, options.overrides);
  const ArchitectureConfig model = architecture_of(run_config);
  validate(model);
  const MemoryPlan plan = memory_plan(options, run_config);
  if (options.json) {
    fmt::print("{}\n", to_json(model, plan).dump(2));
    return;
  }
  const std::int64_t num_moe = model.num_layers - model.num_dense_layers;
  fmt::print("{}: {} layers ({} MoE), H={}, E={} K={} F={}{}\n", model.name, model.num_layers, num_moe, model.H, model.E, model.K, model.F,
             model.latent > 0 ? fmt::format(", latent {}", model.latent) : "");
  print_parameters(model);
  const TokenFlops flops = flops_per_token(model);
  fmt::print("{:.4g} GFLOP a token, forward and backward at {} tokens a sequence (linear {:.4g}, head {:.4g}, attention {:.4g}{}; router {:.3g} beside it)\n",
             flops.total() / 1e9, model.seq_len, flops.linear / 1e9, flops.head / 1e9, flops.attention / 1e9,
             flops.mtp > 0 ? fmt::format(", multi-token prediction {:.4g}", flops.mtp / 1e9) : "", flops.router / 1e9);
  print_memory(model, plan, options.precision);
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
