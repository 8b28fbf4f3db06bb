// SPDX-License-Identifier: Apache-2.0
#include "waybill/model_math.h"

#include <algorithm>
#include <cmath>

#include "ops/model/cross_entropy.h"

namespace waybill {
namespace {

std::int64_t attention_parameters(const ArchitectureConfig& c) {
  const AttentionShape& a = c.attention;
  if (a.kind == AttentionKind::kGQA) return c.H * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads);
  const std::int64_t query_width = a.num_heads * (a.nope_dim + a.rope_dim);
  const std::int64_t query = a.q_rank > 0 ? c.H * a.q_rank + a.q_rank * query_width : c.H * query_width;
  const std::int64_t key_value = c.H * (a.kv_rank + a.rope_dim) + a.kv_rank * a.num_heads * (a.nope_dim + a.v_dim);
  return query + key_value + a.num_heads * a.v_dim * c.H;
}

// Width of the attention core in 6 * layers * width * seq: scores and values, halved for causality.
double attention_width(const AttentionShape& a) {
  if (a.kind == AttentionKind::kGQA) return static_cast<double>(a.num_heads * a.head_dim);
  return static_cast<double>(a.num_heads * (a.nope_dim + a.rope_dim + a.v_dim)) / 2;
}

std::int64_t layer_norm_parameters(const ArchitectureConfig& c) {
  const AttentionShape& a = c.attention;
  std::int64_t count = 2 * c.H;
  if (a.kind == AttentionKind::kGQA && a.qk_norm) count += 2 * a.head_dim;
  if (a.kind == AttentionKind::kMLA) count += a.q_rank + a.kv_rank;
  return count;
}

std::int64_t matrices(const ArchitectureConfig& c) { return c.gated ? 3 : 2; }
std::int64_t row_width(const ArchitectureConfig& c) { return c.latent > 0 ? c.latent : c.H; }
std::int64_t moe_layers(const ArchitectureConfig& c) { return c.num_layers - c.num_dense_layers; }

std::int64_t expert_matrix_parameters(const ArchitectureConfig& c) { return matrices(c) * c.F * row_width(c); }
std::int64_t expert_bias_parameters(const ArchitectureConfig& c) { return c.expert_bias ? (matrices(c) - 1) * c.F + row_width(c) : 0; }
std::int64_t shared_parameters(const ArchitectureConfig& c) { return matrices(c) * c.shared_F * c.H + (c.shared_gate ? c.H : 0); }
std::int64_t latent_parameters(const ArchitectureConfig& c) { return 2 * c.latent * c.H; }

// Weights a token multiplies with in one MoE feed-forward, the router left out.
std::int64_t active_moe_linear(const ArchitectureConfig& c) {
  return c.K * expert_matrix_parameters(c) + latent_parameters(c) + matrices(c) * c.shared_F * c.H;
}

}  // namespace

void validate(const ArchitectureConfig& c) {
  WB_CHECK(c.vocab > 0 && c.H > 0 && c.seq_len > 0, "{}: vocab {}, H {} and seq_len {} must be positive", c.name, c.vocab, c.H, c.seq_len);
  WB_CHECK(c.num_layers > 0 && c.num_dense_layers >= 0 && c.num_dense_layers <= c.num_layers, "{}: {} dense layers of {} layers", c.name, c.num_dense_layers,
           c.num_layers);
  WB_CHECK(c.num_dense_layers == 0 || c.dense_F > 0, "{}: {} dense layers need dense_F, got {}", c.name, c.num_dense_layers, c.dense_F);
  if (moe_layers(c) > 0) {
    WB_CHECK(c.E > 0 && c.K > 0 && c.F > 0, "{}: MoE layers need E, K and F, got {}, {}, {}", c.name, c.E, c.K, c.F);
    WB_CHECK(c.K <= c.E, "{}: K = {} exceeds E = {}", c.name, c.K, c.E);
  }
  WB_CHECK(c.shared_F >= 0 && c.latent >= 0 && c.mtp_layers >= 0, "{}: shared_F {}, latent {} and mtp_layers {} must not be negative", c.name, c.shared_F,
           c.latent, c.mtp_layers);
  WB_CHECK(c.mtp_layers == 0 || moe_layers(c) > 0, "{}: MTP modules are MoE layers, but all {} layers are dense", c.name, c.num_layers);
  const AttentionShape& a = c.attention;
  WB_CHECK(a.num_heads > 0, "{}: num_heads {} must be positive", c.name, a.num_heads);
  if (a.kind == AttentionKind::kGQA) {
    WB_CHECK(a.num_kv_heads > 0 && a.head_dim > 0 && a.num_heads % a.num_kv_heads == 0, "{}: {} heads, {} key/value heads of {}: heads must divide", c.name,
             a.num_heads, a.num_kv_heads, a.head_dim);
  } else {
    WB_CHECK(a.q_rank >= 0 && a.kv_rank > 0 && a.nope_dim > 0 && a.rope_dim >= 0 && a.v_dim > 0,
             "{}: MLA needs kv_rank, nope_dim and v_dim, got q_rank {}, kv_rank {}, nope_dim {}, rope_dim {}, v_dim {}", c.name, a.q_rank, a.kv_rank,
             a.nope_dim, a.rope_dim, a.v_dim);
  }
}

ParameterCounts count_parameters(const ArchitectureConfig& c) {
  validate(c);
  ParameterCounts n;
  const std::int64_t layers = c.num_layers, moe = moe_layers(c);
  const std::int64_t expert = expert_matrix_parameters(c) + expert_bias_parameters(c);
  n.embedding = c.vocab * c.H;
  n.head = c.tie_embeddings ? 0 : c.vocab * c.H;
  n.attention = layers * attention_parameters(c);
  n.norms = layers * layer_norm_parameters(c) + c.H;
  n.dense = c.num_dense_layers * 3 * c.dense_F * c.H;
  n.router = moe * (c.E * c.H + (c.router_bias ? c.E : 0));
  n.latent = moe * latent_parameters(c);
  n.shared = moe * shared_parameters(c);
  n.experts = moe * c.E * expert;
  n.active_experts = moe * c.K * expert;
  // An MTP module: two norms of its inputs, the projection 2H -> H, one MoE layer and its final norm; embedding and head are shared.
  const std::int64_t module = 2 * c.H * c.H + 3 * c.H + attention_parameters(c) + layer_norm_parameters(c) + c.E * c.H + (c.router_bias ? c.E : 0) +
                              latent_parameters(c) + shared_parameters(c) + c.E * expert;
  n.mtp = c.mtp_layers * module;
  return n;
}

TokenFlops flops_per_token(const ArchitectureConfig& c) {
  validate(c);
  TokenFlops f;
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double layer_attention = 6 * attention_width(c.attention) * d(c.seq_len);
  const double moe_layer = 6 * d(attention_parameters(c) + active_moe_linear(c));
  f.linear = 6 * (d(c.num_layers) * d(attention_parameters(c)) + d(c.num_dense_layers) * d(3 * c.dense_F * c.H) + d(moe_layers(c)) * d(active_moe_linear(c)));
  f.head = 6 * d(c.vocab) * d(c.H);
  f.attention = d(c.num_layers) * layer_attention;
  f.router = 6 * d(moe_layers(c)) * d(c.E) * d(c.H);
  f.mtp = d(c.mtp_layers) * (moe_layer + layer_attention + 6 * d(2 * c.H * c.H) + f.head);
  return f;
}

namespace {

// Bytes of one layer's operand copies (src/moe/recipe_operands.h): the largest product of each buffer. Blocked recipes hold dequantised fp32
// and, for wgrad, the rows slot by slot.
double operand_bytes(const ArchitectureConfig& c, const MemoryPlan& plan, double rows, double slots) {
  if (plan.recipe == Recipe::kF32) return 0;
  const bool is_blocked = plan.recipe != Recipe::kBF16;
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double W = d(row_width(c)), F = d(c.F), inner = d(matrices(c) - 1), I = inner * F, T = d(plan.tokens_per_rank);
  const double shared_I = inner * d(c.shared_F), shared_wide = c.shared_F > 0 ? std::max(d(c.H), shared_I) : 0;
  const double left = std::max({(is_blocked ? slots : rows) * W, slots * I, T * shared_wide});
  const double right = std::max(slots * I, T * shared_wide);
  const double weights = std::max(d(c.E) / plan.P * W * I, d(c.H) * shared_I);
  return (left + right + weights) * (is_blocked ? 4 : 2);
}

}  // namespace

MemoryEstimate memory_per_rank(const ArchitectureConfig& c, const MemoryPlan& plan) {
  const ParameterCounts n = count_parameters(c);
  WB_CHECK(plan.P >= 1 && plan.D >= 1 && plan.tokens_per_rank >= 0, "P {}, D {}, tokens_per_rank {}", plan.P, plan.D, plan.tokens_per_rank);
  WB_CHECK(moe_layers(c) == 0 || c.E % plan.P == 0, "{}: E = {} is not divisible by P = {}", c.name, c.E, plan.P);
  const std::int64_t mtp_experts = c.mtp_layers * c.E * (expert_matrix_parameters(c) + expert_bias_parameters(c));
  const std::int64_t all = n.total() + n.mtp, experts = n.experts + mtp_experts;
  MemoryEstimate m;
  m.parameters = all - experts + experts / plan.P;
  const double parameters = static_cast<double>(m.parameters);
  m.weights = parameters * plan.weight_bytes;
  m.gradients = parameters * plan.grad_bytes;
  m.optimizer = parameters * plan.optimizer_bytes;

  const double T = static_cast<double>(plan.tokens_per_rank), bytes = plan.activation_bytes;
  const double slots = T * static_cast<double>(c.K) * plan.receive_factor;
  const double rows = std::min(slots, T * static_cast<double>(plan.P));
  const AttentionShape& a = c.attention;
  const double qkv = a.kind == AttentionKind::kGQA ? static_cast<double>((a.num_heads + 2 * a.num_kv_heads) * a.head_dim)
                                                   : static_cast<double>(a.num_heads * (2 * (a.nope_dim + a.rope_dim) + a.v_dim));
  const double core_out = a.kind == AttentionKind::kGQA ? static_cast<double>(a.num_heads * a.head_dim) : static_cast<double>(a.num_heads * a.v_dim);
  // Block inputs of both halves, query/key/value, the core's output and its log-sum-exp.
  const double attention = T * (2 * static_cast<double>(c.H) + qkv + core_out) * bytes + T * static_cast<double>(a.num_heads) * 4;
  const double inner = static_cast<double>(matrices(c) - 1);
  const double dense = T * 2 * static_cast<double>(c.dense_F) * bytes;
  double moe = slots * 8 + T * inner * static_cast<double>(c.shared_F) * bytes + T * static_cast<double>(c.K) * 6;  // routes, shared expert
  if (plan.recompute != Recompute::kLayer) moe += rows * static_cast<double>(row_width(c)) * bytes + slots * inner * static_cast<double>(c.F) * bytes;
  if (plan.recompute == Recompute::kNone) moe += slots * static_cast<double>(c.F) * bytes;
  const double moe_count = static_cast<double>(moe_layers(c) + c.mtp_layers);
  m.activations = static_cast<double>(c.num_layers + c.mtp_layers) * attention + static_cast<double>(c.num_dense_layers) * dense + moe_count * moe;
  if (moe_count > 0) m.receive_window = (2 * rows + slots) * static_cast<double>(row_width(c)) * bytes;
  m.operands = moe_count * operand_bytes(c, plan, rows, slots);
  m.logits = static_cast<double>(std::min<std::int64_t>(plan.tokens_per_rank, cross_entropy_chunk_rows(c.vocab)) * c.vocab) * 4;
  return m;
}

ArchitectureConfig architecture_of(const ModelConfig& config) {
  ArchitectureConfig c;
  c.name = config.name;
  c.vocab = config.vocab;
  c.H = config.H;
  c.seq_len = config.seq_len;
  c.num_layers = static_cast<std::int64_t>(config.layers.size());
  c.tie_embeddings = config.tie_embeddings;
  c.attention.num_heads = config.num_heads;
  c.attention.num_kv_heads = config.num_kv_heads;
  c.attention.head_dim = config.head_dim;
  c.attention.qk_norm = config.qk_norm;
  const MoeConfig* first = nullptr;
  for (const LayerConfig& layer : config.layers) {
    if (!layer.is_moe) {
      WB_CHECK(first == nullptr && (c.dense_F == 0 || c.dense_F == layer.dense_F), "{}: dense layers must lead and share one width", c.name);
      c.dense_F = layer.dense_F;
      ++c.num_dense_layers;
      continue;
    }
    const MoeConfig& m = layer.moe;
    if (first == nullptr) {
      first = &m;
      c.E = m.E;
      c.K = m.K;
      c.F = m.F;
      c.shared_F = m.shared_F;
      c.latent = m.latent;
      c.gated = m.activation.kind != Activation::kReluSquared;
      c.expert_bias = m.expert_bias;
      c.router_bias = m.bias_update_rate > 0;
    }
    WB_CHECK(m.E == first->E && m.K == first->K && m.F == first->F && m.shared_F == first->shared_F && m.latent == first->latent,
             "{}: MoE layers differ in shape (E {} and {}, K {} and {}, F {} and {})", c.name, m.E, first->E, m.K, first->K, m.F, first->F);
  }
  return c;
}

}  // namespace waybill
