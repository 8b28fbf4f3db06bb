// SPDX-License-Identifier: Apache-2.0
// The parameters of a rank: names, shapes, first values, and where each layer's lie in the list.
#pragma once

#include <cstdint>
#include <vector>

#include "waybill/language_model.h"

namespace waybill::model {

inline constexpr int kNone = -1;  // the layer has no such parameter

// Indices into the parameter list.
struct AttentionParameters {
  int norm = kNone, wq = kNone, wk = kNone, wv = kNone, wo = kNone;
  int q_norm = kNone, k_norm = kNone;
};
struct FeedForwardParameters {
  int norm = kNone;
  int w1 = kNone, w2 = kNone;  // dense: [2F, H] gate then up, [H, F]; MoE: the experts'
  int gate = kNone, router_bias = kNone, b1 = kNone, b2 = kNone;
  int shared_w1 = kNone, shared_w2 = kNone, latent_down = kNone, latent_up = kNone;
};
struct LayerParameters {
  AttentionParameters attention;
  FeedForwardParameters feed_forward;
};
struct ParameterList {
  std::vector<Parameter> parameters;
  std::vector<LayerParameters> layers;
  int embedding = kNone, final_norm = kNone, head = kNone;  // head == embedding where tied
};

// The layer's MoE configuration with the model's sizes filled in.
MoeConfig moe_config(const ModelConfig& config, const LayerConfig& layer);

// Values are a function of (seed, name, global index): matrices normal with init_std, those that write to the residual stream
// times 1 / sqrt(2 layers); norm weights 1; biases 0. `rank`: position in the world; expert-parallel groups are ranks with equal
// rank / P.
ParameterList make_parameters(const ModelConfig& config, int rank, std::uint64_t seed, ThreadPool* pool);

// Views of a layer's MoE parameters, or of their gradients.
MoeTensors moe_tensors(const ParameterList& list, const FeedForwardParameters& at, bool gradients);

}  // namespace waybill::model
