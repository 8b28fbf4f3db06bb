// SPDX-License-Identifier: Apache-2.0
// Reference router: keys in fp32 by the shared score functions, so that ids are exact; everything else in double with libm, one row
// at a time, in the order of the formulas.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/balanced_order.h"
#include "core/scalar_math.h"
#include "ops/router/router_impl.h"

namespace waybill::router_impl {
namespace {

struct Row {
  std::vector<float> x;      // logits in fp32
  std::vector<char> exists;  // finite and not masked
  bool has_nonfinite = false;
};

Row read_row(const RouterConfig& config, const RouterInputs& inputs, std::int64_t t) {
  Row row{std::vector<float>(static_cast<std::size_t>(config.E)), std::vector<char>(static_cast<std::size_t>(config.E)), false};
  const std::int64_t begin = t * inputs.logits.stride[0];
  for (std::size_t e = 0; e < row.x.size(); ++e) {
    const std::int64_t i = begin + static_cast<std::int64_t>(e);
    switch (inputs.logits.dtype) {
      case DType::kBF16:
        row.x[e] = static_cast<const bf16*>(inputs.logits.data)[i];
        break;
      case DType::kF16:
        row.x[e] = static_cast<const f16*>(inputs.logits.data)[i];
        break;
      default:
        row.x[e] = static_cast<const float*>(inputs.logits.data)[i];
    }
    const bool is_finite = std::isfinite(row.x[e]);
    row.has_nonfinite |= !is_finite;
    row.exists[e] = is_finite && !(inputs.expert_mask && static_cast<const std::uint8_t*>(inputs.expert_mask.data)[e] != 0);
  }
  return row;
}

float score_f32(ScoreFunction score, float x) {
  if (score == ScoreFunction::kSigmoid) return scalar::sigmoid(x);
  if (score == ScoreFunction::kSqrtSoftplus) return scalar::sqrt_softplus(x);
  return x;
}

struct Candidate {
  float key;
  std::int32_t id;
};

std::vector<GroupRank> rank_groups(const RouterConfig& config, const std::vector<Candidate>& sorted) {
  std::vector<GroupRank> groups(static_cast<std::size_t>(config.num_groups));
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].id = static_cast<std::int64_t>(g);
  const std::int64_t n = keys_per_group_score(config);
  for (const Candidate& candidate : sorted) {
    GroupRank& group = groups[static_cast<std::size_t>(candidate.id / (config.E / config.num_groups))];
    if (group.num_keys < n) group.score = group.num_keys++ == 0 ? candidate.key : group.score + candidate.key;
  }
  std::sort(groups.begin(), groups.end(), comes_before);
  return groups;
}

std::vector<Candidate> sorted_candidates(const RouterConfig& config, const Row& row, const float* bias) {
  std::vector<Candidate> candidates;
  for (std::size_t e = 0; e < row.x.size(); ++e) {
    const float score = score_f32(config.score, row.x[e]);
    const float key = bias != nullptr ? score + bias[e] : score;
    if (row.exists[e] != 0 && std::isfinite(key)) candidates.push_back({key, static_cast<std::int32_t>(e)});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.key > b.key; });
  return candidates;
}

// The chosen experts, best first, at most K.
std::vector<std::int32_t> select(const RouterConfig& config, const Row& row, const float* bias, bool with_groups) {
  std::vector<Candidate> candidates = sorted_candidates(config, row, bias);
  if (with_groups && uses_groups(config)) {
    std::vector<GroupRank> groups = rank_groups(config, candidates);
    groups.resize(static_cast<std::size_t>(config.num_kept_groups));
    const auto is_dropped = [&](const Candidate& c) {
      const std::int64_t group = c.id / (config.E / config.num_groups);
      return std::none_of(groups.begin(), groups.end(), [&](const GroupRank& kept) { return kept.id == group; });
    };
    std::erase_if(candidates, is_dropped);
  }
  std::vector<std::int32_t> ids;
  for (const Candidate& candidate : candidates) {
    if (static_cast<std::int64_t>(ids.size()) < config.K) ids.push_back(candidate.id);
  }
  return ids;
}

// Forced balance and replay.
std::vector<std::int32_t> given_ids(const ForwardCall& call, const Row& row, std::int64_t t) {
  const RouterConfig& config = call.config;
  std::vector<std::int32_t> ids;
  for (std::int64_t k = 0; k < config.K; ++k) {
    std::int64_t id = 0;
    if (call.inputs.replay_ids) {
      const std::int64_t i = t * config.K + k;
      const TensorView& replay = call.inputs.replay_ids;
      id = replay.dtype == DType::kI16 ? static_cast<const std::int16_t*>(replay.data)[i] : static_cast<const std::int32_t*>(replay.data)[i];
    } else {
      id = BalancedOrder(config.E).expert((call.inputs.token_offset + t) * config.K + k);
    }
    if (id < -1 || id >= config.E) {
      if (call.outputs.status != nullptr) {
        call.outputs.status->flags |= kStatusBadId;
        ++call.outputs.status->num_bad_ids;
      }
      id = -1;
    }
    ids.push_back(id >= 0 && row.exists[static_cast<std::size_t>(id)] != 0 ? static_cast<std::int32_t>(id) : -1);
  }
  return ids;
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// log of the raw score, up to a constant of the row for softmax.
double log_score(ScoreFunction score, double x) {
  if (score == ScoreFunction::kSigmoid) return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x)));
  if (score == ScoreFunction::kSqrtSoftplus) return x < -30 ? 0.5 * x : 0.5 * std::log(softplus(x));
  return x;
}

// d log_score / dx
double log_score_slope(ScoreFunction score, double x) {
  const double sigmoid = x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
  if (score == ScoreFunction::kSigmoid) return x < 0 ? 1 / (1 + std::exp(x)) : std::exp(-x) / (1 + std::exp(-x));
  if (score == ScoreFunction::kSqrtSoftplus) return x < -30 ? 0.5 : sigmoid / (2 * softplus(x));
  return 1;
}

// log sum exp of fn(x_e) over the entries that exist; -inf without any.
template <class Fn>
double log_sum_exp(const Row& row, const Fn& fn) {
  double largest = -INFINITY;
  for (std::size_t e = 0; e < row.x.size(); ++e) {
    if (row.exists[e] != 0) largest = std::max(largest, fn(static_cast<double>(row.x[e])));
  }
  if (largest == -INFINITY) return largest;
  double sum = 0;
  for (std::size_t e = 0; e < row.x.size(); ++e) {
    if (row.exists[e] != 0) sum += std::exp(fn(static_cast<double>(row.x[e])) - largest);
  }
  return largest + std::log(sum);
}

// w_k / scaling_factor.
std::vector<double> unit_weights(const RouterConfig& config, const Row& row, const std::vector<std::int32_t>& ids) {
  std::vector<double> weights(ids.size(), 0.0);
  const auto log_s = [&](std::int32_t id) { return log_score(config.score, row.x[static_cast<std::size_t>(id)]); };
  double shift = 0;  // subtracted in the log domain
  if (is_renormalised(config)) {
    double largest = -INFINITY;
    for (const std::int32_t id : ids) largest = id < 0 ? largest : std::max(largest, log_s(id));
    double sum = 0;
    for (const std::int32_t id : ids) sum += id < 0 ? 0.0 : std::exp(log_s(id) - largest);
    shift = largest + std::log(sum);
  } else if (is_softmax(config.score)) {
    shift = log_sum_exp(row, [](double x) { return x; });
  }
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] >= 0) weights[k] = std::exp(log_s(ids[k]) - shift);
  }
  if (config.normalise_epsilon > 0) {
    float sum = 0;
    std::int64_t num_valid = 0;
    for (const std::int32_t id : ids) {
      if (id < 0) continue;
      sum += score_f32(config.score, row.x[static_cast<std::size_t>(id)]);
      ++num_valid;
    }
    for (std::size_t k = 0; k < ids.size(); ++k) {
      if (ids[k] < 0) continue;
      const double s = score_f32(config.score, row.x[static_cast<std::size_t>(ids[k])]);
      weights[k] = sum > 0 ? s / (sum + config.normalise_epsilon) : 1.0 / static_cast<double>(num_valid);
    }
  }
  return weights;
}

const float* bias_of(const RouterInputs& inputs) { return inputs.expert_bias ? static_cast<const float*>(inputs.expert_bias.data) : nullptr; }

}  // namespace

std::vector<GroupRank> rank_groups_ref(const RouterConfig& config, const RouterInputs& inputs, std::int64_t t) {
  return rank_groups(config, sorted_candidates(config, read_row(config, inputs, t), bias_of(inputs)));
}

void forward_ref(const ForwardCall& call) {
  const RouterConfig& config = call.config;
  const RouteView& route = call.outputs.route;
  const bool is_given = call.inputs.replay_ids || config.forced_balance != ForcedBalance::kOff;
  if (call.outputs.counts_unbiased != nullptr) std::fill_n(call.outputs.counts_unbiased, config.E, 0);
  if (call.outputs.weight_factors != nullptr) std::fill_n(call.outputs.weight_factors, call.outputs.route.T, 0.0f);  // none: the logits are at hand
  for (std::int64_t t = 0; t < route.T; ++t) {
    std::vector<std::int32_t> ids;
    std::vector<double> weights;
    if (!is_padding(call.inputs, t)) {
      const Row row = read_row(config, call.inputs, t);
      ids = is_given ? given_ids(call, row, t) : select(config, row, bias_of(call.inputs), true);
      weights = unit_weights(config, row, ids);
      ids.resize(static_cast<std::size_t>(config.K), -1);
      weights.resize(ids.size(), 0.0);
      if (call.outputs.counts_unbiased != nullptr) {
        for (const std::int32_t id : select(config, row, nullptr, false)) ++call.outputs.counts_unbiased[id];
      }
      if (call.outputs.status != nullptr) {
        call.outputs.status->num_nonfinite_rows += row.has_nonfinite;
        call.outputs.status->num_short_rows += std::find(ids.begin(), ids.end(), -1) != ids.end();
      }
    }
    for (std::int64_t k = 0; k < config.K; ++k) {
      route.set_id(t, k, ids.empty() ? -1 : ids[static_cast<std::size_t>(k)]);
      route.weights[t * config.K + k] = ids.empty() ? 0.0f : config.scaling_factor * static_cast<float>(weights[static_cast<std::size_t>(k)]);
    }
  }
  write_counts(call);
  write_score_sums_ref(call);
}

void write_score_sums_ref(const ForwardCall& call) {
  double* sums = call.outputs.score_sums;
  if (sums == nullptr) return;
  std::fill_n(sums, call.config.E + 1, 0.0);
  for (std::int64_t t = 0; t < call.outputs.route.T; ++t) {
    if (is_padding(call.inputs, t)) continue;
    const Row row = read_row(call.config, call.inputs, t);
    const auto log_s = [&](double x) { return log_score(call.config.score, x); };
    const double score_lse = log_sum_exp(row, log_s), logit_lse = log_sum_exp(row, [](double x) { return x; });
    if (logit_lse == -INFINITY) continue;
    for (std::size_t e = 0; e < row.x.size(); ++e) sums[e] += row.exists[e] != 0 ? std::exp(log_s(row.x[e]) - score_lse) : 0.0;
    sums[call.config.E] += logit_lse * logit_lse;
  }
}

namespace {

// Factors n_e -> a_e of one row's loss: L_row = sum_e a_e P_e.
struct LossFactors {
  double aux = 0, z = 0;         // aux: times n_e
  std::vector<double> counts;    // n_e of the aux loss
  std::vector<double> sequence;  // per sequence: times its n_be
};

std::int64_t num_sequences(const RouterLossConfig& losses, std::int64_t T) { return losses.sequence_coefficient != 0 ? T / losses.sequence_length : 0; }

LossFactors loss_factors(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                         const RouterLossInputs& given) {
  LossFactors factors;
  const double valid = static_cast<double>(count_valid_tokens(inputs, 0, route.T));
  const double experts_per_route = static_cast<double>(config.E) / static_cast<double>(config.K);
  const double aux_tokens = given.aux_tokens > 0 ? given.aux_tokens : valid;
  const double loss_tokens = given.loss_tokens > 0 ? given.loss_tokens : valid;
  if (valid > 0) {
    factors.aux = losses.aux_coefficient * experts_per_route / (aux_tokens * loss_tokens);
    factors.z = losses.z_coefficient / loss_tokens;
  }
  factors.counts.assign(static_cast<std::size_t>(config.E), 0.0);
  for (std::int64_t i = 0; given.aux_counts == nullptr && i < route.T * route.K; ++i) {
    const std::int32_t id = route.id(i / route.K, i % route.K);
    if (id >= 0 && id < config.E && !is_padding(inputs, i / route.K)) factors.counts[static_cast<std::size_t>(id)] += 1;
  }
  for (std::size_t e = 0; given.aux_counts != nullptr && e < factors.counts.size(); ++e) factors.counts[e] = given.aux_counts[e];
  double num_nonempty = 0;
  for (std::int64_t b = 0; b < num_sequences(losses, route.T); ++b) {
    const double tokens = static_cast<double>(count_valid_tokens(inputs, b * losses.sequence_length, (b + 1) * losses.sequence_length));
    num_nonempty += tokens > 0;
    factors.sequence.push_back(tokens > 0 ? losses.sequence_coefficient * experts_per_route / (tokens * tokens) : 0.0);
  }
  for (double& factor : factors.sequence) factor /= given.num_sequences > 0 ? given.num_sequences : std::max(num_nonempty, 1.0);
  return factors;
}

std::vector<double> sequence_counts(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                    std::int64_t b) {
  std::vector<double> counts(static_cast<std::size_t>(config.E), 0.0);
  for (std::int64_t t = b * losses.sequence_length; t < (b + 1) * losses.sequence_length; ++t) {
    for (std::int64_t k = 0; k < route.K && !is_padding(inputs, t); ++k) {
      const std::int32_t id = route.id(t, k);
      if (id >= 0 && id < config.E) counts[static_cast<std::size_t>(id)] += 1;
    }
  }
  return counts;
}

}  // namespace

RouterLosses losses_ref(const LossesCall& call) {
  const LossFactors factors = loss_factors(call.config, call.losses, call.inputs, call.route, call.loss_inputs);
  RouterLosses sums;
  if (uses_score_sums(call)) {
    const double* given = call.loss_inputs.score_sums;
    for (std::size_t e = 0; e < factors.counts.size(); ++e) sums.aux += factors.aux * factors.counts[e] * given[e];
    sums.z = factors.z * given[call.config.E];
    return sums;
  }
  std::vector<double> n_b;
  for (std::int64_t t = 0; t < call.route.T; ++t) {
    const std::int64_t b = factors.sequence.empty() ? 0 : t / call.losses.sequence_length;
    if (!factors.sequence.empty() && t % call.losses.sequence_length == 0) n_b = sequence_counts(call.config, call.losses, call.inputs, call.route, b);
    if (is_padding(call.inputs, t)) continue;
    const Row row = read_row(call.config, call.inputs, t);
    const auto log_s = [&](double x) { return log_score(call.config.score, x); };
    const double score_lse = log_sum_exp(row, log_s);
    const double logit_lse = log_sum_exp(row, [](double x) { return x; });
    if (logit_lse == -INFINITY) continue;
    for (std::size_t e = 0; e < row.x.size(); ++e) {
      if (row.exists[e] == 0) continue;
      const double p = std::exp(log_s(row.x[e]) - score_lse);
      sums.aux += factors.aux * factors.counts[e] * p;
      if (!n_b.empty()) sums.sequence += factors.sequence[static_cast<std::size_t>(b)] * n_b[e] * p;
    }
    sums.z += factors.z * logit_lse * logit_lse;
  }
  return sums;
}

void backward_ref(const BackwardCall& call) {
  const RouterConfig& config = call.config;
  const RouteView& route = call.route;
  const LossFactors factors = loss_factors(config, call.losses, call.inputs, route, call.loss_inputs);
  std::vector<double> n_b;
  for (std::int64_t t = 0; t < route.T; ++t) {
    const std::int64_t b = factors.sequence.empty() ? 0 : t / call.losses.sequence_length;
    if (!factors.sequence.empty() && t % call.losses.sequence_length == 0) n_b = sequence_counts(config, call.losses, call.inputs, route, b);
    float* out = static_cast<float*>(call.d_logits.data) + t * call.d_logits.stride[0];
    std::fill_n(out, config.E, 0.0f);
    if (is_padding(call.inputs, t)) continue;
    const Row row = read_row(config, call.inputs, t);
    const auto log_s = [&](double x) { return log_score(config.score, x); };
    const double score_lse = log_sum_exp(row, log_s);
    const double logit_lse = log_sum_exp(row, [](double x) { return x; });
    if (logit_lse == -INFINITY) continue;

    std::vector<double> d(row.x.size(), 0.0);
    double dot = 0;                                  // sum_k g_k w_k
    bool is_uniform = config.normalise_epsilon > 0;  // every selected score underflowed: the weights are constants
    for (std::int64_t k = 0; k < route.K && call.d_weights != nullptr; ++k) {
      const std::int32_t id = route.id(t, k);
      if (id < 0 || id >= config.E) continue;
      dot += static_cast<double>(call.d_weights[t * route.K + k]) * route.weights[t * route.K + k];
      is_uniform &= score_f32(config.score, row.x[static_cast<std::size_t>(id)]) == 0;
    }
    for (std::int64_t k = 0; k < route.K && call.d_weights != nullptr && !is_uniform; ++k) {
      const std::int32_t id = route.id(t, k);
      if (id < 0 || id >= config.E) continue;
      const double centred = is_renormalised(config) ? dot / config.scaling_factor : 0.0;
      d[static_cast<std::size_t>(id)] += log_score_slope(config.score, row.x[static_cast<std::size_t>(id)]) * route.weights[t * route.K + k] *
                                         (static_cast<double>(call.d_weights[t * route.K + k]) - centred);
    }

    double mean_a = 0;
    const auto a = [&](std::size_t e) {
      return factors.aux * factors.counts[e] + (n_b.empty() ? 0.0 : factors.sequence[static_cast<std::size_t>(b)] * n_b[e]);
    };
    for (std::size_t e = 0; e < row.x.size(); ++e) mean_a += row.exists[e] != 0 ? a(e) * std::exp(log_s(row.x[e]) - score_lse) : 0.0;
    for (std::size_t e = 0; e < row.x.size(); ++e) {
      if (row.exists[e] == 0) continue;
      const double softmax = std::exp(row.x[e] - logit_lse);
      if (!is_renormalised(config) && is_softmax(config.score)) d[e] -= softmax * dot;
      d[e] += call.loss_scale * std::exp(log_s(row.x[e]) - score_lse) * (a(e) - mean_a) * log_score_slope(config.score, row.x[e]);
      d[e] += call.loss_scale * 2 * factors.z * logit_lse * softmax;
      out[e] = static_cast<float>(d[e]);
    }
  }
}

}  // namespace waybill::router_impl
