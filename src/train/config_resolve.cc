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
  const std::vector<std::string> counted = counted_only_settings(config);
  if (!counted.empty())
    WB_FAIL(ErrorCode::kUnsupported, "{}: this engine does not train {}; `waybill inspect model` gives the model's sizes", config.name,
            fmt::join(counted, ", "));
}

// Widths whose kind of layer is switched off would be left out of the sizes without a word.
void check_counted(const RunConfig& config) {
  const CountedOnly& c = config.counted;
  const AttentionShape& a = c.attention;
  const bool has_mla = a.q_rank > 0 || a.kv_rank > 0 || a.nope_dim > 0 || a.rope_dim > 0 || a.v_dim > 0;
  WB_CHECK(a.kind == AttentionKind::kMLA || !has_mla,
           "{}: model.q_rank = {}, kv_rank = {}, nope_dim = {}, rope_dim = {}, v_dim = {} need model.attention = \"mla\"", config.name, a.q_rank, a.kv_rank,
           a.nope_dim, a.rope_dim, a.v_dim);
  const DeltaNetShape& d = c.delta_net;
  const bool has_delta_net = d.num_key_heads > 0 || d.num_value_heads > 0 || d.key_dim > 0 || d.value_dim > 0;
  WB_CHECK(c.full_attention_interval > 1 || !has_delta_net,
           "{}: model.linear_key_heads = {}, linear_value_heads = {}, linear_key_dim = {}, linear_value_dim = {} need model.full_attention_interval above 1",
           config.name, d.num_key_heads, d.num_value_heads, d.key_dim, d.value_dim);
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
  check_counted(config);
  check_training(config);
  validate(config.model, config.parallel.W());  // its messages begin with the model's name, which is the run's
  validate(config.train.optimizer);
}

std::vector<std::string> counted_only_settings(const RunConfig& config) {
  const CountedOnly& c = config.counted;
  std::vector<std::string> list;
  if (c.attention.kind == AttentionKind::kMLA) list.emplace_back("model.attention = \"mla\"");
  if (c.attention.output_gate) list.emplace_back("model.output_gate = true");
  if (c.full_attention_interval > 1) list.push_back(fmt::format("model.full_attention_interval = {}", c.full_attention_interval));
  if (c.mtp_layers > 0) list.push_back(fmt::format("model.mtp_layers = {}", c.mtp_layers));
  if (c.shared_gate) list.emplace_back("model.shared_gate = true");
  return list;
}

ArchitectureConfig architecture_of(const RunConfig& config) {
  check_counted(config);
  const CountedOnly& counted = config.counted;
  ArchitectureConfig shape = architecture_of(config.model);
  const AttentionShape heads = shape.attention;
  shape.attention = counted.attention;
  shape.attention.num_heads = heads.num_heads;
  shape.attention.num_kv_heads = heads.num_kv_heads;
  shape.attention.head_dim = heads.head_dim;
  shape.attention.qk_norm = heads.qk_norm;
  shape.delta_net = counted.delta_net;
  shape.mtp_layers = counted.mtp_layers;
  for (std::size_t i = 0; i < shape.layers.size(); ++i) {
    LayerShape& layer = shape.layers[i];
    layer.is_delta_net = (static_cast<std::int64_t>(i) + 1) % counted.full_attention_interval != 0;
    layer.shared_gate = counted.shared_gate && layer.is_moe;
  }
  return shape;
}

}  // namespace waybill
