// SPDX-License-Identifier: Apache-2.0
// A decoder language model with dense or MoE feed-forward layers, one object per rank of the world.
// Pre-norm blocks: x += attention(norm(x)); x += feed_forward(norm(x)); logits = norm(x) * embedding^T (or an own head).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "waybill/fabric.h"
#include "waybill/moe.h"
#include "waybill/parameter.h"

namespace waybill {

struct LayerConfig {
  bool is_moe = false;
  std::int64_t dense_F = 0;  // SwiGLU width of a dense layer
  MoeConfig moe{};           // H, sequence_length and T_max are filled in from the model
  int P = 1;                 // expert-parallel ranks of this layer; the world has W = P x D ranks, experts are replicated D times
};

struct ModelConfig {
  std::string name = "model";
  std::int64_t vocab = 256, H = 128, num_heads = 4, num_kv_heads = 4, head_dim = 32;
  std::int64_t seq_len = 256;
  std::int64_t max_sequences = 0;  // most sequences of a micro-batch on a rank; only MoE layers in captured mode need it
  bool qk_norm = false;
  bool tie_embeddings = true;
  float rope_theta = 10000.0f, norm_epsilon = 1e-5f, init_std = 0.02f;
  std::vector<LayerConfig> layers;
};
WB_API void validate(const ModelConfig& config, int W);

struct MoeLayerStats {
  int layer = 0;
  std::vector<std::int64_t> counts;                 // [E] over all ranks and micro-batches of the step
  std::vector<std::int64_t> rank_slots;             // [P] slots received per expert-parallel rank (this rank's group)
  double aux = 0, sequence = 0, global = 0, z = 0;  // over all ranks
  std::int64_t nonfinite_rows = 0, short_rows = 0;
};

struct StepStats {
  double loss = 0;          // mean cross-entropy over the step's tokens, nats, all ranks
  double aux_loss = 0;      // sum of the auxiliary losses, all ranks
  std::int64_t tokens = 0;  // of all ranks
  bool valid = true;        // false: a receive budget overflowed on some rank; the update must be skipped
  StatusWord status;        // of this rank, all layers
  std::vector<MoeLayerStats> layers;
  PhaseTimes times;         // of this rank
  ExchangeBytes bytes;      // of this rank
  double expert_flops = 0;  // of this rank, this step
};

class WB_API LanguageModel {
 public:
  // world: all ranks. Weights depend on (seed, name, global index) only, never on P or W.
  LanguageModel(const ModelConfig& config, Fabric& world, std::uint64_t seed, ThreadPool* pool = nullptr);
  ~LanguageModel();

  const ModelConfig& config() const;
  std::vector<Parameter>& parameters();

  void zero_gradients();
  // One optimizer step's gradients: micro-batches of tokens [B, seq_len + 1] int32 each (inputs and shifted targets; -1 = padding:
  // a position whose token or next token is -1 has no loss and no routes). B may differ between ranks and may be 0; the number of
  // micro-batches may not. Gradients are overwritten (not added to): they are of the mean loss over all valid tokens of all ranks
  // and micro-batches, auxiliary losses included, and already reduced over ranks. Collective.
  // rounding_seed: of the step's random numbers, where a layer's recipe takes any; the same on every rank.
  StepStats forward_backward(std::span<const TensorView> micro_batches, std::uint64_t rounding_seed = 0);
  // Mean cross-entropy over all ranks' valid tokens; changes no state. kOverflow where a captured receive budget is too small.
  double evaluate(const TensorView& tokens);
  // Logits [T, vocab] of one sequence of 1 .. seq_len tokens on every rank (collective: all ranks give the same tokens).
  void logits(std::span<const std::int32_t> tokens, const TensorView& out);
  // The aux-free bias update of every MoE layer, once per optimizer step, from the step's counts. An invalid step changes nothing.
  void update_router_bias(const StepStats& stats);
  // Gradient norm (L2) with every parameter counted once over the world (each expert once), equal bits on every rank. Collective.
  double gradient_norm();
  // Called on this rank after every MoE layer's forward of forward_backward() (not of evaluations), with the routes it took; null = off.
  // The route lives until the call returns.
  using RouteObserver = std::function<void(int layer, std::size_t micro_batch, const Route& route)>;
  void set_route_observer(RouteObserver observer);
  // After an invalid step: a larger receive budget for every MoE layer (MoeLayer::set_receive_factor). The same on every rank.
  void set_receive_factor(double factor);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace waybill
