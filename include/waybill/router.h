// SPDX-License-Identifier: Apache-2.0
// The router: logits [T, E] -> compact routes [T, K], and back. Nothing [T, E] is produced but the gradient of the logits.
#pragma once

#include <cstdint>

#include "waybill/route.h"
#include "waybill/status.h"
#include "waybill/stream.h"
#include "waybill/workspace.h"

namespace waybill {

enum class ScoreFunction : std::uint8_t {
  kSoftmax = 0,          // softmax over all E, then top-k; without renormalise the weights sum to less than 1
  kSoftmaxSelected = 1,  // top-k on the logits, softmax over the chosen
  kSigmoid = 2,
  kSqrtSoftplus = 3,     // sqrt(log(1 + e^x))
};

enum class GroupScore : std::uint8_t {
  kTop2Sum = 0,      // sum of the 2 best biased scores of a group (of 1 where the group has one expert)
  kTopKPerGroup = 1, // sum of the K / num_kept_groups best
};

enum class ForcedBalance : std::uint8_t { kOff = 0, kRoundRobin = 1 };

struct RouterConfig {
  std::int64_t E = 0, K = 0;
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool renormalise = true;         // explicit; K = 1 with renormalise is allowed and warns once
  float scaling_factor = 1.0f;     // multiplies the weights last
  std::int64_t num_groups = 1, num_kept_groups = 1;
  GroupScore group_score = GroupScore::kTop2Sum;
  float normalise_epsilon = 0.0f;  // parity mode: weights = s / (sum + epsilon); 0 = exact log-domain normalisation
  ForcedBalance forced_balance = ForcedBalance::kOff;  // ids: reversed bits of (t*K+k) for a power of two E, else round robin
  std::int64_t offset_alignment = 1;  // of RouterOutputs::aligned_offsets
};

// Refuses what cannot work, naming the rule and the values: K < 1, K > E, E % G, kept > G, kept*E/G < K, a group score without
// an expert, scaling_factor not finite, bias with a softmax score is allowed (it selects only).
WB_API void validate(const RouterConfig& config);

struct RouterInputs {
  TensorView logits;        // [T, E] fp32, bf16 or fp16; rows may be strided, columns are dense
  TensorView expert_bias;   // [E] fp32, selection only; or null
  TensorView expert_mask;   // [E] u8, 1 = never choose; or null
  TensorView padding_mask;  // [T] u8, 1 = padding token: all -1, weight 0, gradient 0; or null
  TensorView replay_ids;    // [T, K] int16/int32 routes to take instead of choosing; or null
  std::int64_t token_offset = 0;  // index of row 0 in the global batch (forced balance is the same at any P)
};

struct RouterOutputs {
  RouteView route;                     // ids, weights, counts written
  std::int32_t* counts_unbiased = nullptr;  // [E] counts of the set chosen without bias and groups, when asked
  std::int32_t* offsets = nullptr;          // [E+1] prefix sum of counts, when asked
  std::int32_t* aligned_offsets = nullptr;  // [E+1] each expert rounded up to offset_alignment, when asked
  StatusWord* status = nullptr;             // num_nonfinite_rows and num_short_rows are added to, when given
};

// Chooses experts. Ids and their order are bit-equal for every implementation (reference, fast CPU, CUDA).
WB_API void router_forward(const RouterConfig& config, const RouterInputs& inputs, const RouterOutputs& outputs, Stream stream = {});

// Auxiliary losses. Coefficients 0 = off. Counts and token totals are inputs, so that the caller can reduce them over ranks and
// micro-batches; they are constants of the gradient.
struct RouterLossConfig {
  float aux_coefficient = 0;     // Switch loss: c * E / (K T^2) * sum_e n_e P_e, n and T from the counts below
  float sequence_coefficient = 0;  // the same formula per sequence, mean over sequences; counts are this call's own
  float z_coefficient = 0;       // c * mean_t (logsumexp_t)^2
  std::int64_t sequence_length = 0;  // rows per sequence (sequence_coefficient > 0); T must be a multiple
  // "Global" loss is the aux loss with counts that also cover accumulated micro-batches: give those counts.
};

struct RouterLossInputs {
  const std::int32_t* aux_counts = nullptr;  // [E] n_e over all ranks (and micro-batches) whose tokens `aux_tokens` counts
  double aux_tokens = 0;       // valid tokens those counts cover
  double loss_tokens = 0;      // valid tokens the aux and z sums are averaged over (0 = this call's valid tokens); with P ranks
                               // give the total over ranks: the per-rank values then add up to the loss
  double num_sequences = 0;    // sequences the sequence loss is averaged over (0 = this call's)
};

struct RouterLosses {
  double aux = 0, sequence = 0, z = 0;  // this call's share, coefficient included
};

// Values of the losses for these logits. Deterministic, fixed-order sums. `route` gives K and, for the sequence loss, counts.
WB_API RouterLosses router_losses(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                  const RouterLossInputs& loss_inputs, Stream stream = {});

// d_logits [T, E] fp32 is written once (not accumulated): the routes' part from d_weights [T, K] plus the losses' part.
// loss_scale multiplies the loss gradients only. Saved state: the ids and weights of `route`.
WB_API void router_backward(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                            const float* d_weights, const RouterLossInputs& loss_inputs, float loss_scale, const TensorView& d_logits, Stream stream = {});

}  // namespace waybill
