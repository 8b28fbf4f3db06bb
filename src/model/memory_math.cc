// SPDX-License-Identifier: Apache-2.0
// Bytes on one rank: the engine's own tensors, layer by layer.
#include <algorithm>

#include "model/layer_math.h"
#include "ops/model/cross_entropy.h"

namespace waybill {
namespace {

using namespace model;

double real(std::int64_t value) { return static_cast<double>(value); }

// Kept by a layer's attention or delta net: its input and the block's, the core's inputs and output, the log-sum-exp or the gates.
double mixer_bytes(const ArchitectureConfig& c, bool is_delta_net, double T, double bytes) {
  const double inputs = 2 * real(c.H);
  if (is_delta_net) {
    const DeltaNetShape& d = c.delta_net;
    // Projections before and after the convolution, output gate and output; decay and step size in fp32.
    const double widths = 2 * real(2 * d.key_width() + d.value_width()) + 2 * real(d.value_width());
    return T * (inputs + widths) * bytes + T * 2 * real(d.num_value_heads) * 4;
  }
  const AttentionShape& a = c.attention;
  const bool is_gqa = a.kind == AttentionKind::kGQA;
  const double qkv = is_gqa ? real((a.num_heads + 2 * a.num_kv_heads) * a.head_dim) : real(a.num_heads * (2 * (a.nope_dim + a.rope_dim) + a.v_dim));
  const double core_out = is_gqa ? real(a.num_heads * a.head_dim) : real(a.num_heads * a.v_dim);
  return T * (inputs + qkv + core_out * (a.output_gate ? 2 : 1)) * bytes + T * real(a.num_heads) * 4;
}

// Of one MoE layer and one micro-batch of T tokens.
struct LayerLoad {
  double T, slots, rows;
  // No budget is above the worst case: every token of every rank, with as many routes as a rank has experts (receive_budget() in exchange.cc).
  LayerLoad(const LayerShape& layer, const MemoryPlan& plan)
      : T(real(plan.tokens_per_rank)),
        slots(std::min(T * real(layer.K) * plan.receive_factor, T * layer.P * real(std::min<std::int64_t>(layer.K, layer.E / layer.P)))),
        rows(std::min(slots, T * layer.P)) {}
};

// Kept by an MoE feed-forward (MoeStep in waybill/moe.h): routes and plans, logits, shared expert, latent output, rows and inner values.
double moe_bytes(const ArchitectureConfig& c, const LayerShape& layer, const LayerLoad& load, double bytes) {
  const double inner = real(matrices(layer) - 1), T = load.T;
  double sum = load.slots * 8 + T * real(layer.K) * 6 + T * real(layer.latent) * bytes;
  if (layer.recompute == Recompute::kLayer) return sum;
  sum += T * real(layer.E) * 4 + T * inner * real(layer.shared_F) * bytes;
  sum += load.rows * real(row_width(c, layer)) * bytes + load.slots * inner * real(layer.F) * bytes;
  if (layer.recompute == Recompute::kNone) sum += load.slots * real(layer.F) * bytes;
  return sum;
}

// One layer's operand copies (src/moe/recipe_operands.h): the largest product of each buffer. Blocked recipes hold dequantised fp32 and,
// for wgrad, the rows slot by slot.
double operand_bytes(const ArchitectureConfig& c, const LayerShape& layer, const LayerLoad& load) {
  if (layer.recipe == Recipe::kF32) return 0;
  const bool is_blocked = layer.recipe != Recipe::kBF16;
  const double W = real(row_width(c, layer)), inner = real(matrices(layer) - 1), I = inner * real(layer.F);
  const double shared_I = inner * real(layer.shared_F), shared_wide = layer.shared_F > 0 ? std::max(real(c.H), shared_I) : 0;
  const double left = std::max({(is_blocked ? load.slots : load.rows) * W, load.slots * I, load.T * shared_wide});
  const double right = std::max(load.slots * I, load.T * shared_wide);
  const double weights = std::max(real(layer.E) / layer.P * W * I, real(c.H) * shared_I);
  return (left + right + weights) * (is_blocked ? 4 : 2);
}

}  // namespace

MemoryEstimate memory_per_rank(const ArchitectureConfig& c, const MemoryPlan& plan) {
  const ParameterCounts n = count_parameters(c);
  WB_CHECK(plan.tokens_per_rank >= 0, "{}: tokens_per_rank {} must not be negative", c.name, plan.tokens_per_rank);
  const double T = real(plan.tokens_per_rank), bytes = plan.activation_bytes;
  MemoryEstimate m;
  m.parameters = n.total() + n.mtp;
  const auto add_moe = [&](const LayerShape& layer, std::size_t i, std::int64_t count) {
    WB_CHECK(layer.P >= 1 && layer.E % layer.P == 0, "{}: layer {}: E = {} is not divisible by P = {}", c.name, i, layer.E, layer.P);
    const LayerLoad load(layer, plan);
    m.parameters -= count * (layer.E - layer.E / layer.P) * expert_parameters(c, layer);
    m.activations += real(count) * moe_bytes(c, layer, load, bytes);
    m.operands += real(count) * operand_bytes(c, layer, load);
    m.receive_window = std::max(m.receive_window, (2 * load.rows + load.slots) * real(row_width(c, layer)) * bytes);
  };
  for (std::size_t i = 0; i < c.layers.size(); ++i) {
    const LayerShape& layer = c.layers[i];
    m.activations += mixer_bytes(c, layer.is_delta_net, T, bytes);
    if (layer.is_moe)
      add_moe(layer, i, 1);
    else
      m.activations += T * 2 * real(layer.dense_F) * bytes;
  }
  if (c.mtp_layers > 0) {
    m.activations += real(c.mtp_layers) * mixer_bytes(c, false, T, bytes);
    add_moe(c.layers.back(), c.layers.size() - 1, c.mtp_layers);
  }
  m.weights = real(m.parameters) * plan.weight_bytes;
  m.gradients = real(m.parameters) * plan.grad_bytes;
  m.optimizer = real(m.parameters) * plan.optimizer_bytes;
  m.logits = real(std::min<std::int64_t>(plan.tokens_per_rank, cross_entropy_chunk_rows(c.vocab)) * c.vocab) * 4;
  return m;
}

double scratch_per_rank(const ModelConfig& c, const MemoryPlan& plan) {
  const double T = real(plan.tokens_per_rank), H = real(c.H), q = real(c.num_heads * c.head_dim), kv = real(c.num_kv_heads * c.head_dim);
  const ArchitectureConfig shapes = architecture_of(c);
  double dense_F = 0, moe = 0, in_window = 0, kept = 0;
  for (std::size_t i = 0; i < c.layers.size(); ++i) {
    const LayerConfig& layer = c.layers[i];
    if (c.qk_norm) kept += T * (q + kv);  // before the norm
    if (!layer.is_moe) {
      dense_F = std::max(dense_F, real(layer.dense_F));
      continue;
    }
    const MoeConfig& m = layer.moe;
    const LayerLoad load(shapes.layers[i], plan);
    const double P = layer.P, L = real(m.E) / P, W = real(m.row_width()), inner = real(m.inner_width());
    double missed = 1;  // chance that none of a token's K experts is on a given rank
    for (std::int64_t k = 0; k < m.K; ++k) missed *= std::max(0.0, (real(m.E) - L - real(k)) / real(m.E - k));
    const double rows = plan.receive_factor > 1 ? load.rows : std::min(load.rows, T * P * (1 - missed)), sent = T * P * (1 - missed) * (P - 1) / P;
    kept += (rows - load.rows) * W;  // memory_per_rank() counts no token twice only where it must
    // y, da, dh, d_slot_weight; z, dz, d_rows; what dispatch and combine send and receive; d_logits, d_weights
    moe += load.slots * (W + real(m.F) + inner + 1) + 3 * rows * W + 2 * sent * W + T * real(m.E + m.K);
    moe += T * (3 * real(m.latent) + real(m.shared_F + m.shared_inner_width()));
    in_window = std::max(in_window, (2 * load.rows + load.slots) * W);
  }
  // normed and d_normed of both halves, out, and the model's last hidden state, its norm and gradient; d_o, dq, dk, dv; a, da, dh
  const double model = T * (8 * H + 2 * q + 2 * kv + 4 * dense_F);
  return (model + moe + kept - in_window) * plan.activation_bytes;
}

}  // namespace waybill
