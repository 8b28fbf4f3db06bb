// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>

#include "config_schema.h"
#include "waybill/error.h"

namespace waybill {
namespace {

void apply(LayerConfig& layer, const std::string& name, const ConfigValue& value) {
  if (name == "kind") {
    layer.is_moe = std::get<std::string>(value) == "moe";
  } else if (name == "dense_F") {
    layer.dense_F = std::get<std::int64_t>(value);
  } else if (name == "P") {
    layer.P = static_cast<int>(std::get<std::int64_t>(value));
  } else {
    for (const LayerKey& key : layer_keys()) {
      if (key.name == name) key.set(layer, value);
    }
  }
}

// Fields that are the same number under two names.
void complete(LayerConfig& layer, const ModelConfig& model) {
  layer.moe.H = model.H;
  layer.moe.router.E = layer.moe.E;
  layer.moe.router.K = layer.moe.K;
  layer.moe.sequence_length = model.seq_len;
}

void check_layers(const RunConfig& config) {
  for (std::size_t i = 0; i < config.model.layers.size(); ++i) {
    const LayerConfig& layer = config.model.layers[i];
    if (!layer.is_moe) {
      WB_CHECK(layer.dense_F > 0, "{}: layer {} is dense but model.dense_F is not set", config.name, i);
      continue;
    }
    const MoeConfig& moe = layer.moe;
    WB_CHECK(moe.E > 0 && moe.K > 0 && moe.F > 0, "{}: layer {} needs moe.E = {}, moe.K = {} and moe.F = {} above 0", config.name, i, moe.E, moe.K, moe.F);
    WB_CHECK(moe.K <= moe.E, "{}: layer {}: moe.K = {} exceeds moe.E = {}", config.name, i, moe.K, moe.E);
    WB_CHECK(moe.E % layer.P == 0, "{}: layer {}: moe.E = {} is not divisible by P = {} ranks", config.name, i, moe.E, layer.P);
    WB_CHECK(config.parallel.W() % layer.P == 0, "{}: layer {}: W = {} ranks are not divisible by P = {}", config.name, i, config.parallel.W(), layer.P);
  }
}

void check_training(const RunConfig& config) {
  const TrainSettings& train = config.train;
  const std::int64_t parts = train.micro_batches * config.parallel.W();
  WB_CHECK(train.global_batch % parts == 0, "{}: train.global_batch = {} is not divisible by micro_batches * W = {} * {}", config.name, train.global_batch,
           train.micro_batches, config.parallel.W());
  WB_CHECK(train.min_learning_rate <= train.learning_rate, "{}: train.min_learning_rate = {} exceeds train.learning_rate = {}", config.name,
           train.min_learning_rate, train.learning_rate);
  WB_CHECK(train.warmup_steps <= train.steps, "{}: train.warmup_steps = {} exceeds train.steps = {}", config.name, train.warmup_steps, train.steps);
  const ArchitectureConfig& shape = config.shape_only;
  WB_CHECK(shape.attention.kind == AttentionKind::kGQA && shape.mtp_layers == 0 && !shape.shared_gate,
           "{}: model.attention = mla, mtp_layers and shared_gate describe models for `inspect model`; this engine does not train them", config.name);
}

// The layers agree in everything that sizes depend on.
bool same_shape(const LayerConfig& a, const LayerConfig& b) {
  return a.moe.E == b.moe.E && a.moe.K == b.moe.K && a.moe.F == b.moe.F && a.moe.latent == b.moe.latent && a.moe.shared_F == b.moe.shared_F &&
         a.moe.activation.kind == b.moe.activation.kind && a.moe.expert_bias == b.moe.expert_bias;
}

// The name becomes part of a folder's name, so it may not lead elsewhere or hide the folder.
void check_name(const std::string& name) {
  constexpr std::size_t kMaxLength = 100;
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  const bool good =
      !name.empty() && name.size() <= kMaxLength && std::all_of(name.begin(), name.end(), is_plain) && std::isalnum(static_cast<unsigned char>(name[0])) != 0;
  WB_CHECK(good, "name = {} must be 1 to {} letters, digits, '-', '_' or '.', and begin with a letter or digit", to_toml_value(name), kMaxLength);
}

}  // namespace

void resolve(RunConfig& config) {
  check_name(config.name);
  WB_CHECK(config.num_dense_layers <= config.num_layers, "model.num_dense_layers = {} exceeds model.num_layers = {}", config.num_dense_layers,
           config.num_layers);
  config.model.name = config.name;
  config.model.layers.assign(static_cast<std::size_t>(config.num_layers), config.layer);
  for (std::size_t i = 0; i < config.model.layers.size(); ++i) {
    config.model.layers[i].is_moe = static_cast<std::int64_t>(i) >= config.num_dense_layers;
    config.model.layers[i].P = config.parallel.P;
  }
  for (const LayerOverride& override_ : config.layers) {
    for (const std::int64_t index : override_.index) {
      WB_CHECK(index >= 0 && index < config.num_layers, "layers.index = {} is outside the {} layers of the model", index, config.num_layers);
      for (const auto& [name, value] : override_.values) apply(config.model.layers[static_cast<std::size_t>(index)], name, value);
    }
  }
  for (LayerConfig& layer : config.model.layers) complete(layer, config.model);
  config.model.max_sequences = config.train.global_batch / (config.train.micro_batches * config.parallel.W());
}

void validate(const RunConfig& config) {
  check_layers(config);
  check_training(config);
  validate(config.model, config.parallel.W());  // its messages begin with the model's name, which is the run's
  validate(config.train.optimizer);
}

ArchitectureConfig architecture_of(const RunConfig& config) {
  const ModelConfig& model = config.model;
  ArchitectureConfig shape = config.shape_only;
  shape.name = config.name;
  shape.vocab = model.vocab;
  shape.H = model.H;
  shape.seq_len = model.seq_len;
  shape.num_layers = config.num_layers;
  shape.num_dense_layers = 0;
  shape.tie_embeddings = model.tie_embeddings;
  shape.attention.num_heads = model.num_heads;
  shape.attention.num_kv_heads = model.num_kv_heads;
  shape.attention.head_dim = model.head_dim;
  shape.attention.qk_norm = model.qk_norm;
  const LayerConfig* moe = nullptr;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const LayerConfig& layer = model.layers[i];
    if (!layer.is_moe) {
      WB_CHECK(moe == nullptr, "{}: dense layer {} behind MoE layers: sizes are given only for leading dense layers", config.name, i);
      WB_CHECK(shape.num_dense_layers == 0 || shape.dense_F == layer.dense_F, "{}: layer {}: sizes are given only for dense layers of one width", config.name,
               i);
      shape.dense_F = layer.dense_F;
      ++shape.num_dense_layers;
      continue;
    }
    WB_CHECK(moe == nullptr || same_shape(*moe, layer), "{}: layer {} differs from the first MoE layer: sizes are given only for equal MoE layers", config.name,
             i);
    if (moe == nullptr) moe = &layer;
  }
  if (moe != nullptr) {
    const MoeConfig& m = moe->moe;
    shape.E = m.E;
    shape.K = m.K;
    shape.F = m.F;
    shape.latent = m.latent;
    shape.shared_F = m.shared_F;
    shape.gated = m.activation.kind != Activation::kReluSquared;
    shape.expert_bias = m.expert_bias;
    shape.router_bias = m.bias_update_rate > 0;
  }
  return shape;
}

}  // namespace waybill
