// SPDX-License-Identifier: Apache-2.0
// What router.cc hands to an implementation after it has checked every argument, and what the CPU implementations share.
#pragma once

#include <cstdint>
#include <vector>

#include "waybill/router.h"

namespace waybill::router_impl {

struct ForwardCall {
  const RouterConfig& config;
  const RouterInputs& inputs;
  const RouterOutputs& outputs;
  Stream stream;
};

struct LossesCall {
  const RouterConfig& config;
  const RouterLossConfig& losses;
  const RouterInputs& inputs;
  const RouteView& route;
  const RouterLossInputs& loss_inputs;
  Stream stream;
  double* values = nullptr;             // [3] in device memory to write to instead of waiting for the result; CUDA only
  const float* loss_weights = nullptr;  // as router_weighted.h; CUDA only, as the next
  float* values_f32 = nullptr;          // [3] in place of `values`
};

struct BackwardCall {
  const RouterConfig& config;
  const RouterLossConfig& losses;
  const RouterInputs& inputs;
  const RouteView& route;
  const float* d_weights;
  const RouterLossInputs& loss_inputs;
  float loss_scale;
  const TensorView& d_logits;
  Stream stream;
  const float* loss_weights = nullptr;  // as router_weighted.h; CUDA only
};

void forward_ref(const ForwardCall& call);
RouterLosses losses_ref(const LossesCall& call);
void backward_ref(const BackwardCall& call);

void forward_fast(const ForwardCall& call);
RouterLosses losses_fast(const LossesCall& call);
void backward_fast(const BackwardCall& call);

// The weights sum to the scaling factor, whatever the logits.
inline bool is_renormalised(const RouterConfig& config) { return config.renormalise || config.score == ScoreFunction::kSoftmaxSelected; }
inline bool is_softmax(ScoreFunction score) { return score == ScoreFunction::kSoftmax || score == ScoreFunction::kSoftmaxSelected; }
inline bool uses_groups(const RouterConfig& config) { return config.num_kept_groups < config.num_groups; }

// Best keys that enter a group's score.
inline std::int64_t keys_per_group_score(const RouterConfig& config) {
  const std::int64_t group_size = config.E / config.num_groups;
  if (config.group_score == GroupScore::kTopKPerGroup) return config.K / config.num_kept_groups;
  return group_size < 2 ? group_size : 2;
}

inline bool is_padding(const RouterInputs& inputs, std::int64_t t) {
  return inputs.padding_mask && static_cast<const std::uint8_t*>(inputs.padding_mask.data)[t] != 0;
}
// A group and what it is ranked by.
struct GroupRank {
  std::int64_t id = 0;
  std::int64_t num_keys = 0;  // candidates that entered the score
  float score = 0;
};
inline bool comes_before(const GroupRank& a, const GroupRank& b) {
  if (a.num_keys != b.num_keys) return a.num_keys > b.num_keys;
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}
// All groups of row t, best first, as the reference ranks them.
std::vector<GroupRank> rank_groups_ref(const RouterConfig& config, const RouterInputs& inputs, std::int64_t t);

std::int64_t count_valid_tokens(const RouterInputs& inputs, std::int64_t begin, std::int64_t end);

// Writes counts, offsets and aligned offsets from the ids of the route, as far as they are asked for.
void write_counts(const ForwardCall& call);
// Writes RouterOutputs::score_sums where they are asked for.
void write_score_sums_ref(const ForwardCall& call);
void write_score_sums_fast(const ForwardCall& call);

// The values are made from RouterLossInputs::score_sums.
inline bool uses_score_sums(const LossesCall& call) { return call.loss_inputs.score_sums != nullptr && call.losses.sequence_coefficient == 0; }

}  // namespace waybill::router_impl
