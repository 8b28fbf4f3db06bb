// SPDX-License-Identifier: Apache-2.0
#include "waybill/model_math.h"

#include <algorithm>

#include "model/layer_math.h"

namespace waybill {
namespace model {

std::int64_t attention_parameters(const ArchitectureConfig& c) {
  const AttentionShape& a = c.attention;
  if (a.kind == AttentionKind::kGQA) return c.H * a.head_dim * ((a.output_gate ? 3 : 2) * a.num_heads + 2 * a.num_kv_heads);
  const std::int64_t query_width = a.num_heads * (a.nope_dim + a.rope_dim);
  const std::int64_t query = a.q_rank > 0 ? c.H * a.q_rank + a.q_rank * query_width : c.H * query_width;
  const std::int64_t key_value = c.H * (a.kv_rank + a.rope_dim) + a.kv_rank * a.num_heads * (a.nope_dim + a.v_dim);
  return query + key_value + a.num_heads * a.v_dim * c.H;
}

std::int64_t delta_net_matrices(const ArchitectureConfig& c) {
  const DeltaNetShape& d = c.delta_net;
  return c.H * (2 * d.key_width() + 2 * d.value_width() + 2 * d.num_value_heads) + d.value_width() * c.H;
}

std::int64_t delta_net_convolution(const ArchitectureConfig& c) { return c.delta_net.conv_width * (2 * c.delta_net.key_width() + c.delta_net.value_width()); }

std::int64_t matrices(const LayerShape& layer) { return layer.gated ? 3 : 2; }
std::int64_t row_width(const ArchitectureConfig& c, const LayerShape& layer) { return layer.latent > 0 ? layer.latent : c.H; }

std::int64_t expert_parameters(const ArchitectureConfig& c, const LayerShape& layer) {
  const std::int64_t width = row_width(c, layer);
  return matrices(layer) * layer.F * width + (layer.expert_bias ? (matrices(layer) - 1) * layer.F + width : 0);
}

}  // namespace model

namespace {

using namespace model;

std::int64_t norm_parameters(const ArchitectureConfig& c, bool is_delta_net) {
  const AttentionShape& a = c.attention;
  if (is_delta_net) return 2 * c.H + c.delta_net.value_dim;
  if (a.kind == AttentionKind::kMLA) return 2 * c.H + a.q_rank + a.kv_rank;
  return 2 * c.H + (a.qk_norm ? 2 * a.head_dim : 0);
}

std::int64_t router_parameters(const ArchitectureConfig& c, const LayerShape& layer) { return layer.E * c.H + (layer.router_bias ? layer.E : 0); }
std::int64_t latent_parameters(const ArchitectureConfig& c, const LayerShape& layer) { return 2 * layer.latent * c.H; }
std::int64_t shared_parameters(const ArchitectureConfig& c, const LayerShape& layer) {
  return matrices(layer) * layer.shared_F * c.H + (layer.shared_gate ? c.H : 0);
}

// Weights a token multiplies with in a feed-forward, router and gate of the shared expert left out.
std::int64_t active_feed_forward(const ArchitectureConfig& c, const LayerShape& layer) {
  if (!layer.is_moe) return 3 * layer.dense_F * c.H;
  return layer.K * matrices(layer) * layer.F * row_width(c, layer) + latent_parameters(c, layer) + matrices(layer) * layer.shared_F * c.H;
}

// Width of the attention core in 6 * width * seq: scores and values, halved for causality.
double attention_width(const AttentionShape& a) {
  if (a.kind == AttentionKind::kGQA) return static_cast<double>(a.num_heads * a.head_dim);
  return static_cast<double>(a.num_heads * (a.nope_dim + a.rope_dim + a.v_dim)) / 2;
}

void validate_layer(const ArchitectureConfig& c, std::size_t i) {
  const LayerShape& layer = c.layers[i];
  if (!layer.is_moe) {
    WB_CHECK(layer.dense_F > 0, "{}: layer {} is dense and needs dense_F, got {}", c.name, i, layer.dense_F);
    return;
  }
  WB_CHECK(layer.E > 0 && layer.K > 0 && layer.F > 0, "{}: layer {} is MoE and needs E, K and F, got {}, {}, {}", c.name, i, layer.E, layer.K, layer.F);
  WB_CHECK(layer.K <= layer.E, "{}: layer {}: K = {} exceeds E = {}", c.name, i, layer.K, layer.E);
  WB_CHECK(layer.shared_F >= 0 && layer.latent >= 0, "{}: layer {}: shared_F {} and latent {} must not be negative", c.name, i, layer.shared_F, layer.latent);
  constexpr double kMaxExperts = 1e15;  // parameters; keeps every sum over layers an int64
  const double experts = static_cast<double>(layer.E) * static_cast<double>(expert_parameters(c, layer));
  WB_CHECK(experts <= kMaxExperts, "{}: layer {}: {} experts of {} parameters each are more than {:.0e} parameters", c.name, i, layer.E,
           expert_parameters(c, layer), kMaxExperts);
  WB_CHECK(!layer.shared_gate || layer.shared_F > 0, "{}: layer {}: a gate on the shared expert needs shared_F", c.name, i);
}

void validate_mixers(const ArchitectureConfig& c) {
  const AttentionShape& a = c.attention;
  WB_CHECK(a.num_heads > 0, "{}: num_heads {} must be positive", c.name, a.num_heads);
  if (a.kind == AttentionKind::kGQA) {
    WB_CHECK(a.num_kv_heads > 0 && a.head_dim > 0 && a.num_heads % a.num_kv_heads == 0, "{}: {} heads, {} key/value heads of {}: heads must divide", c.name,
             a.num_heads, a.num_kv_heads, a.head_dim);
  } else {
    WB_CHECK(!a.output_gate, "{}: an output gate is counted for grouped-query attention only", c.name);
    WB_CHECK(a.q_rank >= 0 && a.kv_rank > 0 && a.nope_dim > 0 && a.rope_dim >= 0 && a.v_dim > 0,
             "{}: MLA needs kv_rank, nope_dim and v_dim, got q_rank {}, kv_rank {}, nope_dim {}, rope_dim {}, v_dim {}", c.name, a.q_rank, a.kv_rank,
             a.nope_dim, a.rope_dim, a.v_dim);
  }
  const DeltaNetShape& d = c.delta_net;
  if (std::none_of(c.layers.begin(), c.layers.end(), [](const LayerShape& layer) { return layer.is_delta_net; })) return;
  WB_CHECK(d.num_key_heads > 0 && d.num_value_heads > 0 && d.num_value_heads % d.num_key_heads == 0 && d.key_dim > 0 && d.value_dim > 0 && d.conv_width > 0,
           "{}: gated delta nets need key heads that divide the value heads, head widths and a convolution, got {} and {} heads of {} and {}, {} taps", c.name,
           d.num_key_heads, d.num_value_heads, d.key_dim, d.value_dim, d.conv_width);
}

}  // namespace

void validate(const ArchitectureConfig& c) {
  WB_CHECK(c.vocab > 0 && c.H > 0 && c.seq_len > 0, "{}: vocab {}, H {} and seq_len {} must be positive", c.name, c.vocab, c.H, c.seq_len);
  WB_CHECK(!c.layers.empty(), "{}: no layers", c.name);
  for (std::size_t i = 0; i < c.layers.size(); ++i) validate_layer(c, i);
  WB_CHECK(c.mtp_layers >= 0, "{}: mtp_layers {} must not be negative", c.name, c.mtp_layers);
  WB_CHECK(c.mtp_layers == 0 || c.layers.back().is_moe, "{}: MTP modules are like the last layer, an MoE layer, but layer {} is dense", c.name,
           c.layers.size() - 1);
  validate_mixers(c);
}

ParameterCounts count_parameters(const ArchitectureConfig& c) {
  validate(c);
  ParameterCounts n;
  n.embedding = c.vocab * c.H;
  n.head = c.tie_embeddings ? 0 : c.vocab * c.H;
  n.norms = c.H;
  for (const LayerShape& layer : c.layers) {
    n.norms += norm_parameters(c, layer.is_delta_net);
    if (layer.is_delta_net)
      n.delta_net += delta_net_matrices(c) + delta_net_convolution(c) + 2 * c.delta_net.num_value_heads;  // and a decay's two values a head
    else
      n.attention += attention_parameters(c);
    if (!layer.is_moe) {
      n.dense += 3 * layer.dense_F * c.H;
      continue;
    }
    n.router += router_parameters(c, layer);
    n.latent += latent_parameters(c, layer);
    n.shared += shared_parameters(c, layer);
    n.experts += layer.E * expert_parameters(c, layer);
    n.active_experts += layer.K * expert_parameters(c, layer);
  }
  if (c.mtp_layers > 0) {
    // An MTP module: two norms of its inputs, the projection 2H -> H, one layer and its final norm; embedding and head are shared.
    const LayerShape& layer = c.layers.back();
    n.mtp = c.mtp_layers * (2 * c.H * c.H + 3 * c.H + attention_parameters(c) + norm_parameters(c, false) + router_parameters(c, layer) +
                            latent_parameters(c, layer) + shared_parameters(c, layer) + layer.E * expert_parameters(c, layer));
  }
  return n;
}

TokenFlops flops_per_token(const ArchitectureConfig& c) {
  validate(c);
  TokenFlops f;
  const auto six = [](std::int64_t products) { return 6 * static_cast<double>(products); };
  const double core = 6 * attention_width(c.attention) * static_cast<double>(c.seq_len);
  const double head = six(c.vocab * c.H);
  f.head = head;
  for (const LayerShape& layer : c.layers) {
    f.linear += six((layer.is_delta_net ? delta_net_matrices(c) : attention_parameters(c)) + active_feed_forward(c, layer));
    if (layer.is_delta_net)
      f.delta_net += six(delta_net_convolution(c) + 4 * c.delta_net.num_value_heads * c.delta_net.key_dim * c.delta_net.value_dim);
    else
      f.attention += core;
    f.router += six(layer.is_moe ? layer.E * c.H : 0);
  }
  f.mtp = static_cast<double>(c.mtp_layers) * (six(attention_parameters(c) + active_feed_forward(c, c.layers.back()) + 2 * c.H * c.H) + core + head);
  return f;
}

ArchitectureConfig architecture_of(const ModelConfig& config) {
  ArchitectureConfig c;
  c.name = config.name;
  c.vocab = config.vocab;
  c.H = config.H;
  c.seq_len = config.seq_len;
  c.tie_embeddings = config.tie_embeddings;
  c.attention.num_heads = config.num_heads;
  c.attention.num_kv_heads = config.num_kv_heads;
  c.attention.head_dim = config.head_dim;
  c.attention.qk_norm = config.qk_norm;
  for (const LayerConfig& layer : config.layers) {
    LayerShape& shape = c.layers.emplace_back();
    shape.is_moe = layer.is_moe;
    if (!layer.is_moe) {
      shape.dense_F = layer.dense_F;
      continue;
    }
    const MoeConfig& m = layer.moe;
    shape.E = m.E;
    shape.K = m.K;
    shape.F = m.F;
    shape.shared_F = m.shared_F;
    shape.latent = m.latent;
    shape.gated = m.activation.kind != Activation::kReluSquared;
    shape.expert_bias = m.expert_bias;
    shape.router_bias = m.bias_update_rate > 0;
    shape.P = layer.P;
    shape.recompute = m.recompute;
    shape.recipe = m.recipe.kind;
  }
  return c;
}

}  // namespace waybill
