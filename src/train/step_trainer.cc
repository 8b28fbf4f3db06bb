// SPDX-License-Identifier: Apache-2.0
#include "step_trainer.h"

#include <algorithm>
#include <cmath>

namespace waybill {
namespace {

// The factor that captured mode starts from; 0 in eager mode, where nothing can overflow.
double initial_factor(const ModelConfig& model) {
  double factor = 0;
  for (const LayerConfig& layer : model.layers) {
    if (layer.is_moe && layer.moe.mode == ExchangeMode::kCaptured) factor = std::max(factor, layer.moe.receive_factor > 0 ? layer.moe.receive_factor : 1.5);
  }
  return factor;
}

}  // namespace

CheckpointInfo initial_info(const RunConfig& config) {
  CheckpointInfo info;
  info.seed = config.train.seed;
  info.W = config.parallel.W();
  info.P = config.parallel.P;
  info.receive_factor = initial_factor(config.model);
  info.config = to_toml(config);
  info.model_config = model_toml(config);
  return info;
}

std::vector<CheckpointTensor> checkpoint_tensors(std::span<const Parameter> parameters, std::span<const OptimizerState> states, std::span<const Tensor> loads,
                                                 std::span<const std::int64_t> load_layers) {
  std::vector<CheckpointTensor> list;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    const auto add = [&](const std::string& prefix, const Tensor& tensor) {
      list.push_back({prefix + p.name, tensor, p.is_expert, p.expert_begin, p.num_experts});
    };
    add("", p.value);
    if (!p.trainable) continue;
    add("optimizer.m.", states[i].m);
    add("optimizer.v.", states[i].v);
  }
  for (std::size_t i = 0; i < loads.size(); ++i) list.push_back({fmt::format("layers.{}.moe.load", load_layers[i]), loads[i], false, 0, 0});
  return list;
}

bool all_finite(std::span<const Parameter> parameters) {
  return std::all_of(parameters.begin(), parameters.end(), [](const Parameter& p) {
    const float* values = p.value.as<float>();
    return std::all_of(values, values + p.value.size(), [](float value) { return std::isfinite(value); });
  });
}

std::int64_t count_parameters(const ModelConfig& config, std::span<const Parameter> parameters, bool active) {
  double sum = 0;
  for (const Parameter& p : parameters) {
    auto size = static_cast<double>(p.value.size());
    if (p.is_expert) {
      size *= static_cast<double>(p.num_experts) / static_cast<double>(p.value.dim(0));
      const MoeConfig& moe = config.layers[static_cast<std::size_t>(p.layer)].moe;
      if (active) size *= static_cast<double>(moe.K) / static_cast<double>(moe.E);
    }
    sum += size;
  }
  return std::llround(sum);
}

}  // namespace waybill
