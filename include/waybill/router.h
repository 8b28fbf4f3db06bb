// SPDX-License-Identifier: Apache-2.0
// The router: logits [T, E] -> compact routes [T, K], and back. Nothing [T, E] is produced but the gradient of the logits.
//
// Rules that every implementation (reference, fast CPU, CUDA) follows to the bit in the ids:
//   key        softmax scores: logit + bias; sigmoid and sqrt-softplus: score + bias, in fp32 (src/core/scalar_math.h). -0 equals +0.
//   candidate  an expert with a finite logit and a finite key that expert_mask does not exclude.
//   order      key descending, then expert id ascending. Slots without a candidate hold id -1 and weight 0 and come last.
//   groups     a group's score is the fp32 sum of its best n keys, added from the best down (n = 2, or 1 where a group has one expert;
//              or K / num_kept_groups). Groups with n candidates come before groups with fewer, then score descending, then group
//              id ascending. Groups that are not kept, or have no candidate, are excluded by a mask, whatever the sign of the keys.
//   weights    from the raw score of the chosen, never from the key. Softmax runs over the finite, unmasked logits (a bias of -Inf does
//              not take an expert out of it). Renormalised scores are normalised in the log domain or scaled, without an added
//              constant, and sum to scaling_factor at any logits.
//   padding    rows with padding_mask = 1 are not looked at: ids -1, weights 0, no counter moves.
// Results do not depend on threads, on other rows, or on repeats. Logits may be strided by rows; offsets are 64-bit.
#pragma once

#include <cstdint>

#include "waybill/route.h"
#include "waybill/status.h"
#include "waybill/stream.h"
#include "waybill/workspace.h"

namespace waybill {

enum class ScoreFunction : std::uint8_t {
  kSoftmax = 0,          // softmax over all E, then top-k; without renormalise the weights sum to less than 1
  kSoftmaxSelected = 1,  // top-k on the logits, softmax over the chosen (what kSoftmax with renormalise computes, too)
  kSigmoid = 2,
  kSqrtSoftplus = 3,  // sqrt(log(1 + e^x))
};

enum class GroupScore : std::uint8_t {
  kTop2Sum = 0,       // sum of the 2 best biased scores of a group (of 1 where the group has one expert)
  kTopKPerGroup = 1,  // sum of the K / num_kept_groups best
};

// ids: route i = (token_offset + t) * K + k goes to the bit-reversed (i mod E), mixed-radix for other E (src/core/balanced_order.h).
// Weights come from the logits at those ids; bias and groups play no part. A slot whose expert is masked or has no finite logit holds
// -1 in place.
enum class ForcedBalance : std::uint8_t { kOff = 0, kRoundRobin = 1 };

struct RouterConfig {
  std::int64_t E = 0, K = 0;
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool renormalise = true;      // explicit; K = 1 with renormalise is allowed and warns once
  float scaling_factor = 1.0f;  // > 0, multiplies the weights last
  std::int64_t num_groups = 1, num_kept_groups = 1;
  GroupScore group_score = GroupScore::kTop2Sum;
  // Parity mode of sigmoid and sqrt-softplus with renormalise: weights = s / (sum + epsilon), as others compute them (uniform where
  // every s is 0). 0 = exact log-domain normalisation.
  float normalise_epsilon = 0.0f;
  ForcedBalance forced_balance = ForcedBalance::kOff;
  std::int64_t offset_alignment = 1;  // of RouterOutputs::aligned_offsets
};

// Refuses what cannot work, naming the rule and the values: K < 1, K > E, E % G, kept outside [1, G], kept * E / G < K, a group score
// of no expert, a scaling factor that is not finite and positive, epsilon without a renormalised sigmoid or sqrt-softplus. A bias
// with a softmax score is allowed (it selects only).
WB_API void validate(const RouterConfig& config);

struct RouterInputs {
  TensorView logits;        // [T, E] fp32, bf16 or fp16; rows may be strided, columns are dense
  TensorView expert_bias;   // [E] fp32, selection only; or null
  TensorView expert_mask;   // [E] u8, 1 = as if the expert did not exist (not chosen, not in a softmax, gradient 0); or null
  TensorView padding_mask;  // [T] u8, 1 = padding token: all -1, weight 0, gradient 0; or null
  // [T, K] int16/int32 routes to take instead of choosing; or null. Order and -1 are kept; a slot whose expert is masked or has no
  // finite logit becomes -1 in place; an id outside [-1, E) becomes -1 and is counted in the status word (num_bad_ids).
  TensorView replay_ids;
  // [T] fp32 of RouterOutputs::weight_factors of the forward pass that made the route, or null. Backward only: what it says about the
  // scores of the chosen need not be read from the logits again. Gradients stay within fp32 rounding of those without it.
  TensorView weight_factors;
  std::int64_t token_offset = 0;  // index of row 0 in the global batch (forced balance is the same at any P)
};

struct RouterOutputs {
  RouteView route;                          // ids and weights written; counts written where the pointer is given
  std::int32_t* counts_unbiased = nullptr;  // [E] counts of the set chosen from these logits without bias and groups, when asked
  std::int32_t* offsets = nullptr;          // [E+1] prefix sum of counts, when asked
  std::int32_t* aligned_offsets = nullptr;  // [E+1] each expert rounded up to offset_alignment, when asked
  // When given, added to: num_nonfinite_rows (unmasked rows with a NaN or Inf logit), num_short_rows (unmasked rows with a slot that
  // has no route), num_bad_ids. Recompute passes null, so that nothing is counted twice.
  StatusWord* status = nullptr;
  // [T], when asked: f with weight = score * f for every route of the row (sigmoid; 0 where the row's weights are made otherwise, and for
  // implementations and scores that give none). Per-row state for the backward pass, see RouterInputs::weight_factors.
  float* weight_factors = nullptr;
  // [E + 1], when asked: what the values of the aux and z losses need of the logits, so that RouterLossInputs::score_sums spares them a second
  // reading. Entry e < E: the sum over the call's valid tokens of P_te (below); entry E: the sum of their squared logsumexps. Deterministic.
  double* score_sums = nullptr;
};

// Chooses experts. All of `outputs` is written (not accumulated), T = 0 included.
WB_API void router_forward(const RouterConfig& config, const RouterInputs& inputs, const RouterOutputs& outputs, Stream stream = {});

// Auxiliary losses. Coefficients 0 = off. Counts and token totals are inputs, so that the caller can reduce them over ranks and
// micro-batches; they are constants of the gradient. P_te are the full scores of a token: softmax, or sigmoid / sqrt-softplus divided
// by their row sum in the log domain; they sum to 1 over the finite, unmasked experts at any logits. Valid tokens are the rows
// that are not padding; a row without a finite logit is a valid token that adds 0.
struct RouterLossConfig {
  float aux_coefficient = 0;         // Switch loss: c * E / (K T^2) * sum_e n_e P_e, n and T from the counts below
  float sequence_coefficient = 0;    // the same formula per sequence, mean over sequences; counts are this call's own
  float z_coefficient = 0;           // c * mean_t (logsumexp of the logits)^2
  std::int64_t sequence_length = 0;  // rows per sequence (sequence_coefficient != 0); T must be a multiple
  // "Global" loss is the aux loss with counts that also cover accumulated micro-batches: give those counts.
};

struct RouterLossInputs {
  const std::int32_t* aux_counts = nullptr;  // [E] n_e over all ranks (and micro-batches); null = the counts of `route`, recounted
  double aux_tokens = 0;                     // valid tokens those counts cover (0 = this call's valid tokens)
  double loss_tokens = 0;                    // valid tokens the aux and z sums are averaged over (0 = this call's valid tokens); with P ranks
                                             // give the total over ranks: the per-rank values then add up to the loss
  double num_sequences = 0;                  // sequences the sequence loss is averaged over (0 = this call's with at least one valid token)
  // [E + 1] RouterOutputs::score_sums of a forward pass over the same logits, or null. Values of the aux and z losses are then made from it and
  // the counts alone; with a sequence loss the logits are read as without. The backward pass does not use it.
  const double* score_sums = nullptr;
};

struct RouterLosses {
  double aux = 0, sequence = 0, z = 0;  // this call's share, coefficient included
};

// Values of the losses for these logits. Deterministic, fixed-order sums. `route` gives the ids of the sequence loss's counts.
WB_API RouterLosses router_losses(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                  const RouterLossInputs& loss_inputs, Stream stream = {});

// The same, written to values [3] (aux, sequence, z) in the memory of the logits. On CUDA it queues and returns, where router_losses() waits for
// its stream; it can be captured.
WB_API void router_losses_into(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                               const RouterLossInputs& loss_inputs, double* values, Stream stream = {});

// d_logits [T, E] fp32 (rows may be strided) is written once, not accumulated: the routes' part from d_weights [T, K] (null = 0) plus
// the losses' part. loss_scale multiplies the loss gradients only. Saved state: the ids and weights of `route`. Exactly 0 for
// padding rows, rows without a candidate, non-finite and masked entries.
WB_API void router_backward(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                            const float* d_weights, const RouterLossInputs& loss_inputs, float loss_scale, const TensorView& d_logits, Stream stream = {});

}  // namespace waybill
