// SPDX-License-Identifier: Apache-2.0
#include "baselines/repeated_max.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "core/scalar_math.h"

namespace waybill::baselines {
namespace {

constexpr float kTaken = -std::numeric_limits<float>::infinity();

// Index of the first maximum of n keys; -1 where every key is taken.
std::int64_t first_maximum(const float* keys, std::int64_t n) {
  std::int64_t best = -1;
  float largest = kTaken;
  for (std::int64_t i = 0; i < n; ++i) {
    if (keys[i] > largest) {
      largest = keys[i];
      best = i;
    }
  }
  return best;
}

class Row {
 public:
  explicit Row(const RouterConfig& config)
      : config_(config),
        E_(config.E),
        scores_(static_cast<std::size_t>(E_)),
        keys_(scores_.size()),
        group_keys_(static_cast<std::size_t>(E_ / config.num_groups)) {}

  // ids and weights [K] of one row of logits. Returns the scores that were looked at.
  std::int64_t choose(const float* logits, const float* bias, std::int32_t* ids, float* weights) {
    visited_ = 0;
    write_scores(logits, bias);
    if (config_.num_groups > 1) drop_groups();
    for (std::int64_t k = 0; k < config_.K; ++k) {
      const std::int64_t best = first_maximum(keys_.data(), E_);
      visited_ += E_;
      ids[k] = static_cast<std::int32_t>(best);
      if (best >= 0) keys_[static_cast<std::size_t>(best)] = kTaken;
    }
    write_weights(logits, ids, weights);
    return visited_;
  }

 private:
  bool is_softmax() const { return config_.score == ScoreFunction::kSoftmax || config_.score == ScoreFunction::kSoftmaxSelected; }

  // Scores (softmax: exp of the distance to the largest logit) and selection keys of every expert.
  void write_scores(const float* logits, const float* bias) {
    float largest = kTaken;
    for (std::int64_t e = 0; e < E_; ++e) largest = std::isfinite(logits[e]) ? std::max(largest, logits[e]) : largest;
    sum_ = 0;
    for (std::int64_t e = 0; e < E_; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const float x = logits[e];
      if (!std::isfinite(x)) {
        scores_[at] = 0;
        keys_[at] = kTaken;
        continue;
      }
      scores_[at] = config_.score == ScoreFunction::kSigmoid        ? scalar::sigmoid(x)
                    : config_.score == ScoreFunction::kSqrtSoftplus ? scalar::sqrt_softplus(x)
                                                                    : scalar::exp(x - largest);
      sum_ += scores_[at];
      const float score = is_softmax() ? x : scores_[at];
      const float key = bias != nullptr ? score + bias[e] : score;
      keys_[at] = std::isfinite(key) ? key : kTaken;
    }
    visited_ += E_;
  }

  // Takes the keys of all but the best groups out of the choice.
  void drop_groups() {
    const std::int64_t size = E_ / config_.num_groups;
    const std::int64_t n = config_.group_score == GroupScore::kTop2Sum ? std::min<std::int64_t>(2, size) : config_.K / config_.num_kept_groups;
    std::vector<float> sums(static_cast<std::size_t>(config_.num_groups), kTaken);
    for (std::int64_t g = 0; g < config_.num_groups; ++g) {
      std::copy_n(keys_.begin() + g * size, size, group_keys_.begin());
      float sum = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t best = first_maximum(group_keys_.data(), size);
        visited_ += size;
        if (best < 0) break;
        sum = i == 0 ? group_keys_[static_cast<std::size_t>(best)] : sum + group_keys_[static_cast<std::size_t>(best)];
        group_keys_[static_cast<std::size_t>(best)] = kTaken;
        sums[static_cast<std::size_t>(g)] = sum;
      }
    }
    std::vector<char> kept(sums.size(), 0);
    for (std::int64_t i = 0; i < config_.num_kept_groups; ++i) {
      const std::int64_t best = first_maximum(sums.data(), config_.num_groups);
      if (best < 0) break;
      kept[static_cast<std::size_t>(best)] = 1;
      sums[static_cast<std::size_t>(best)] = kTaken;
    }
    for (std::int64_t e = 0; e < E_; ++e) {
      if (kept[static_cast<std::size_t>(e / size)] == 0) keys_[static_cast<std::size_t>(e)] = kTaken;
    }
  }

  void write_weights(const float* logits, const std::int32_t* ids, float* weights) const {
    const bool selected = config_.score == ScoreFunction::kSoftmaxSelected;
    const bool normalise = config_.renormalise || selected;
    float largest = kTaken, sum = 0;
    for (std::int64_t k = 0; k < config_.K; ++k) largest = ids[k] >= 0 ? std::max(largest, logits[ids[k]]) : largest;
    for (std::int64_t k = 0; k < config_.K; ++k) {
      // The chosen softmax scores are taken from their own maximum, so that they cannot all underflow.
      weights[k] = ids[k] < 0 ? 0.0f : normalise && is_softmax() ? scalar::exp(logits[ids[k]] - largest) : scores_[static_cast<std::size_t>(ids[k])];
      sum += weights[k];
    }
    const float scale = normalise ? (sum > 0 ? config_.scaling_factor / sum : 0.0f) : is_softmax() ? config_.scaling_factor / sum_ : config_.scaling_factor;
    for (std::int64_t k = 0; k < config_.K; ++k) weights[k] *= scale;
  }

  const RouterConfig& config_;
  std::int64_t E_;
  std::vector<float> scores_, keys_, group_keys_;
  float sum_ = 0;
  std::int64_t visited_ = 0;
};

}  // namespace

void repeated_max_route(const RouterConfig& config, const TensorView& logits, const float* bias, const RouteView& route, std::int64_t& slots_visited,
                        Stream stream) {
  constexpr std::int64_t kGrain = 16;
  const float* values = logits.as<float>();
  std::atomic<std::int64_t> visited{0};
  parallel_for(stream.pool, route.T, kGrain, [&](std::int64_t begin, std::int64_t end) {
    Row row(config);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(route.K));
    std::int64_t mine = 0;
    for (std::int64_t t = begin; t < end; ++t) {
      mine += row.choose(values + t * logits.stride[0], bias, ids.data(), route.weights + t * route.K);
      for (std::int64_t k = 0; k < route.K; ++k) route.set_id(t, k, ids[static_cast<std::size_t>(k)]);
    }
    visited += mine;
  });
  std::fill_n(route.counts, route.E, 0);
  for (std::int64_t i = 0; i < route.T * route.K; ++i) {
    const std::int32_t id = route.id(i / route.K, i % route.K);
    if (id >= 0) ++route.counts[id];
  }
  slots_visited += visited;
}

}  // namespace waybill::baselines
