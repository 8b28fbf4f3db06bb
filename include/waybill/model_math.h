// SPDX-License-Identifier: Apache-2.0
// Closed forms for a transformer's size: parameters, floating-point operations per token and memory per rank. Also for models that
// are too large, or whose attention this engine does not run: nothing is instantiated here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/language_model.h"

namespace waybill {

enum class AttentionKind : std::uint8_t { kGQA = 0, kMLA = 1 };

// Grouped-query attention uses num_heads, num_kv_heads, head_dim; multi-head latent attention (MLA, DeepSeek) the rest.
struct AttentionShape {
  AttentionKind kind = AttentionKind::kGQA;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0, head_dim = 0;
  bool qk_norm = false;
  bool output_gate = false;                            // GQA: sigmoid(x Wg) on the core's output, Wg [num_heads * head_dim, H] (Qwen3-Next)
  std::int64_t q_rank = 0;                             // width of the query's low-rank projection; 0 = one full projection
  std::int64_t kv_rank = 0;                            // width of the shared key/value latent
  std::int64_t nope_dim = 0, rope_dim = 0, v_dim = 0;  // per head: query/key without and with rotation, value
};

// A gated delta net (linear attention, arXiv 2412.06464) as Qwen3-Next builds it: one projection to query, key, value and output gate,
// one to a decay and a step size per value head, a depthwise causal convolution over query, key and value, a norm of value_dim.
struct DeltaNetShape {
  std::int64_t num_key_heads = 0, num_value_heads = 0;  // queries have num_key_heads too
  std::int64_t key_dim = 0, value_dim = 0;              // of a head
  std::int64_t conv_width = 4;                          // taps of the convolution
  std::int64_t key_width() const { return num_key_heads * key_dim; }
  std::int64_t value_width() const { return num_value_heads * value_dim; }
};

// One layer: what mixes its tokens, and its dense or MoE feed-forward.
struct LayerShape {
  bool is_delta_net = false;  // a gated delta net in place of attention
  bool is_moe = false;
  std::int64_t dense_F = 0;  // SwiGLU width of a dense layer
  std::int64_t E = 0, K = 0, F = 0;
  std::int64_t shared_F = 0;  // width of all shared experts together; 0 = none
  bool shared_gate = false;   // a learned scalar gate on the shared expert: H parameters
  std::int64_t latent = 0;    // experts see rows of this width; 0 = H
  bool gated = true;          // routed and shared experts hold 3 matrices (SwiGLU and its like) or 2 (ReLU^2)
  bool expert_bias = false;   // biases on both expert matmuls
  bool router_bias = false;   // aux-free selection bias, E values a layer (no gradient)
  // How a run spreads and computes the layer: only memory_per_rank() reads these.
  int P = 1;                               // expert-parallel ranks
  Recompute recompute = Recompute::kNone;  // of the MoE feed-forward
  Recipe recipe = Recipe::kF32;            // of the expert matmuls
  bool operator==(const LayerShape&) const = default;
};

// Any mix of layers. All attention layers have one shape, and so have all gated delta nets.
struct ArchitectureConfig {
  std::string name = "model";
  std::int64_t vocab = 0, H = 0, seq_len = 4096;
  bool tie_embeddings = false;
  AttentionShape attention;
  DeltaNetShape delta_net;
  std::vector<LayerShape> layers;
  // Multi-token-prediction modules: the last layer's feed-forward (MoE) behind attention, a 2H x H projection and the shared head each.
  std::int64_t mtp_layers = 0;
};
// Refuses sizes that are missing or contradict each other, with the values.
WB_API void validate(const ArchitectureConfig& config);
// The same description of a model this engine runs.
WB_API ArchitectureConfig architecture_of(const ModelConfig& config);

// Parameters. "active": those one token uses; the embedding table and the head count in full in both, MTP modules in neither.
struct ParameterCounts {
  std::int64_t embedding = 0, head = 0;             // head = 0 where tied
  std::int64_t attention = 0, delta_net = 0;        // over all layers, without their norms
  std::int64_t dense = 0, norms = 0;                // over all layers
  std::int64_t router = 0, latent = 0, shared = 0;  // over all layers
  std::int64_t experts = 0, active_experts = 0;     // over all layers; all experts, and the K a token visits
  std::int64_t mtp = 0;                             // all parameters of the MTP modules, not part of total()
  std::int64_t total() const { return embedding + head + attention + delta_net + dense + norms + router + latent + shared + experts; }
  std::int64_t active() const { return total() - experts + active_experts; }
};
WB_API ParameterCounts count_parameters(const ArchitectureConfig& config);

// Floating-point operations per token, forward and backward, valid work only (no recompute, no padding):
// 6 * (active linear parameters + vocab * H * (1 + mtp)) + 6 * attention layers * width * seq (causal halving included), width =
// num_heads * head_dim, of MLA num_heads * (nope_dim + rope_dim + v_dim) / 2. A gated delta net adds
// 6 * (conv_width * (2 key_width + value_width) + 4 * num_value_heads * key_dim * value_dim): convolution, and four products with the
// state (decay and write, read for the error, update, read for the output), an estimate of the recurrent form as Megatron Core takes it.
// The router is left out of `total` by convention and given beside it.
struct TokenFlops {
  double linear = 0, head = 0, attention = 0, delta_net = 0, mtp = 0;
  double router = 0;  // 3 * 2 * H * E a MoE layer, not part of total()
  double total() const { return linear + head + attention + delta_net + mtp; }
};
WB_API TokenFlops flops_per_token(const ArchitectureConfig& config);

// How a run stores the model. Bytes per element; a plain fp32 run as on the CPU engine is the default. Replicas of experts change
// nothing: each holds its own.
struct MemoryPlan {
  std::int64_t tokens_per_rank = 4096;                           // of one micro-batch
  double weight_bytes = 4, grad_bytes = 4, optimizer_bytes = 8;  // per parameter (AdamW: two fp32 moments)
  double activation_bytes = 4;
  double receive_factor = 1;  // received slots / (tokens * K) planned for: 1 = balanced load
};
// Bytes on one rank. A model of the engine's own tensors, not a measurement.
struct MemoryEstimate {
  double weights = 0, gradients = 0, optimizer = 0;
  double activations = 0;       // saved for backward, all layers
  double receive_window = 0;    // rows and expert outputs of the layer in flight that needs most
  double logits = 0;            // of one row chunk of the fused loss
  double operands = 0;          // rounded copies of one product's operands, all layers whose recipe is not fp32
  double scratch = 0;           // what is not kept but stays allocated; cpu_memory() only, not part of total()
  std::int64_t parameters = 0;  // held by this rank
  double total() const { return weights + gradients + optimizer + activations + receive_window + logits + operands; }
};
WB_API MemoryEstimate memory_per_rank(const ArchitectureConfig& config, const MemoryPlan& plan);
// What a model on the CPU holds besides: scratch of attention, of dense layers and of every MoE layer with its exchange's buffers. rows of an MoE layer are
// those of independent uniform routes (or the budget's, where plan.receive_factor is above 1).
WB_API double scratch_per_rank(const ModelConfig& config, const MemoryPlan& plan);

// Bytes on one GPU of a training run; as memory_per_rank(), a model of the engine's own allocations.
struct GpuMemoryEstimate {
  int num_ranks = 1;                                 // of this GPU
  double weights = 0, gradients = 0, optimizer = 0;  // fp32 values and bf16 copies; fp32; two fp32 moments
  double activations = 0;                            // of attention and dense layers, kept for backward
  double moe_windows = 0, moe_steps = 0;             // of the MoE layers: memory that peers reach; what a step keeps for backward
  double scratch = 0;                                // of a layer at a time, and the MoE layers' own
  double total() const { return weights + gradients + optimizer + activations + moe_windows + moe_steps + scratch; }
};

}  // namespace waybill
