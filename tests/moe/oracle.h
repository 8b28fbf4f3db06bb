// SPDX-License-Identifier: Apache-2.0
// A second, independent MoE layer in double precision: one loop over tokens and their experts, own scores and activations, no
// library code. Gradients are central differences of it, so nothing of the library's backward can leak in.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "waybill/moe.h"

namespace waybill::test {

// All experts' tensors of a layer, in one place (no ranks).
template <class Real>
struct Weights {
  std::vector<Real> gate, bias, w1, w2, b1, b2, shared_w1, shared_w2, latent_down, latent_up;

  // body(name, values) for every tensor that has a gradient.
  template <class Body>
  void for_each(const Body& body) {
    body("gate", gate), body("w1", w1), body("w2", w2), body("b1", b1), body("b2", b2);
    body("shared_w1", shared_w1), body("shared_w2", shared_w2), body("latent_down", latent_down), body("latent_up", latent_up);
  }
};

struct OracleInputs {
  std::vector<double> x;                          // [T, H]
  std::vector<std::int32_t> ids;                  // [T, K], -1 = no route
  std::vector<std::uint8_t> masked;               // [T], 1 = padding
  std::vector<double> aux_counts, global_counts;  // [E]
  double aux_tokens = 0, global_tokens = 0;       // tokens those cover
  double loss_tokens = 0;                         // aux and z are averaged over these
};

struct OracleResult {
  std::vector<double> out;      // [T, H]
  std::vector<double> weights;  // [T, K]
  double aux = 0, sequence = 0, global = 0, z = 0;
  double losses() const { return aux + sequence + global + z; }
};

class Oracle {
 public:
  explicit Oracle(const MoeConfig& config) : c_(config) {}

  OracleResult forward(const Weights<double>& w, const OracleInputs& in) const {
    const std::int64_t T = static_cast<std::int64_t>(in.x.size()) / c_.H;
    OracleResult result;
    result.out.assign(in.x.size(), 0.0);
    result.weights.assign(static_cast<std::size_t>(T * c_.K), 0.0);
    for (std::int64_t t = 0; t < T; ++t) token(w, in, t, result);
    losses(w, in, T, result);
    return result;
  }

  // sum(out * d_out) + loss_scale * losses, the scalar that backward differentiates.
  double objective(const Weights<double>& w, const OracleInputs& in, std::span<const float> d_out, double loss_scale) const {
    const OracleResult result = forward(w, in);
    double sum = loss_scale * result.losses();
    for (std::size_t i = 0; i < result.out.size(); ++i) sum += result.out[i] * static_cast<double>(d_out[i]);
    return sum;
  }

  // Central differences of the objective for every element of `values`, a tensor of w or in.x.
  std::vector<double> gradient(Weights<double>& w, OracleInputs& in, std::vector<double>& values, std::span<const float> d_out, double loss_scale) const {
    constexpr double kStep = 1e-5;
    std::vector<double> gradient(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double kept = values[i];
      values[i] = kept + kStep;
      const double above = objective(w, in, d_out, loss_scale);
      values[i] = kept - kStep;
      const double below = objective(w, in, d_out, loss_scale);
      values[i] = kept;
      gradient[i] = (above - below) / (2 * kStep);
    }
    return gradient;
  }

  // The experts a plain sort chooses: score + bias, groups by the sum of their two best, ties to the lower id.
  std::vector<std::int32_t> choose(const Weights<double>& w, std::span<const double> x_row) const {
    const std::vector<double> x = logits(w, x_row);
    std::vector<double> key(x);
    if (c_.router.score == ScoreFunction::kSigmoid || c_.router.score == ScoreFunction::kSqrtSoftplus) key = raw_scores(x);
    for (std::size_t e = 0; e < w.bias.size(); ++e) key[e] += w.bias[e];
    std::vector<bool> allowed(key.size(), true);
    if (c_.router.num_groups > 1) keep_groups(key, allowed);
    std::vector<std::int32_t> chosen;
    for (std::int64_t k = 0; k < c_.K; ++k) {
      std::int32_t best = -1;
      for (std::size_t e = 0; e < key.size(); ++e) {
        if (allowed[e] && (best < 0 || key[e] > key[static_cast<std::size_t>(best)])) best = static_cast<std::int32_t>(e);
      }
      allowed[static_cast<std::size_t>(best)] = false;
      chosen.push_back(best);
    }
    return chosen;
  }

 private:
  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

  std::vector<double> logits(const Weights<double>& w, std::span<const double> x) const {
    std::vector<double> out(static_cast<std::size_t>(c_.E), 0.0);
    for (std::size_t e = 0; e < out.size(); ++e) {
      for (std::size_t h = 0; h < x.size(); ++h) out[e] += w.gate[e * x.size() + h] * x[h];
    }
    return out;
  }

  // Scores before any normalisation over the chosen: softmax over all experts, sigmoid, or sqrt(softplus).
  std::vector<double> raw_scores(const std::vector<double>& x) const {
    std::vector<double> s(x.size());
    double sum = 0;
    for (std::size_t e = 0; e < x.size(); ++e) {
      switch (c_.router.score) {
        case ScoreFunction::kSigmoid:
          s[e] = sigmoid(x[e]);
          break;
        case ScoreFunction::kSqrtSoftplus:
          s[e] = std::sqrt(std::log1p(std::exp(x[e])));
          break;
        default:
          s[e] = std::exp(x[e]);
          sum += s[e];
      }
    }
    if (sum > 0) {
      for (double& value : s) value /= sum;
    }
    return s;
  }

  void keep_groups(const std::vector<double>& key, std::vector<bool>& allowed) const {
    const auto G = static_cast<std::size_t>(c_.router.num_groups), size = key.size() / G;
    std::vector<double> score(G);
    for (std::size_t g = 0; g < G; ++g) {
      double first = -HUGE_VAL, second = -HUGE_VAL;
      for (std::size_t i = g * size; i < (g + 1) * size; ++i) {
        if (key[i] > first)
          second = first, first = key[i];
        else if (key[i] > second)
          second = key[i];
      }
      score[g] = first + (size > 1 ? second : 0.0);
    }
    for (std::size_t g = 0; g < G; ++g) {
      std::int64_t better = 0;
      for (std::size_t o = 0; o < G; ++o) better += score[o] > score[g] || (score[o] == score[g] && o < g) ? 1 : 0;
      for (std::size_t i = g * size; i < (g + 1) * size; ++i) allowed[i] = better < c_.router.num_kept_groups;
    }
  }

  double weight(const std::vector<double>& s, std::span<const std::int32_t> ids, std::size_t k) const {
    if (ids[k] < 0) return 0.0;
    const bool normalise = c_.router.renormalise || c_.router.score == ScoreFunction::kSoftmaxSelected;
    double sum = 0;
    for (const std::int32_t id : ids) sum += id >= 0 ? s[static_cast<std::size_t>(id)] : 0.0;
    return static_cast<double>(c_.router.scaling_factor) * s[static_cast<std::size_t>(ids[k])] / (normalise ? sum : 1.0);
  }

  // act(h) for one expert; h holds gate then up.
  double activate(const std::vector<double>& h, std::size_t f, std::size_t F) const {
    const double limit = c_.activation.limit, alpha = c_.activation.alpha;
    switch (c_.activation.kind) {
      case Activation::kSwiGLU:
        return h[f] * sigmoid(h[f]) * h[F + f];
      case Activation::kClampedSwiGLU: {
        const double gate = std::min(h[f], limit), up = std::max(-limit, std::min(h[F + f], limit));
        return gate * sigmoid(alpha * gate) * (up + 1.0);
      }
      case Activation::kReluSquared:
        return h[f] > 0 ? h[f] * h[f] : 0.0;
    }
    return 0.0;
  }

  // y += scale * (w2 act(w1 row + b1) + b2); null biases are none.
  void mlp(std::span<const double> row, const double* w1, const double* w2, const double* b1, const double* b2, std::int64_t F, double scale,
           std::vector<double>& y) const {
    const auto inner = static_cast<std::size_t>(activation_input_width(c_.activation, F)), width = static_cast<std::size_t>(F);
    std::vector<double> h(inner);
    for (std::size_t i = 0; i < inner; ++i) {
      h[i] = b1 != nullptr ? b1[i] : 0.0;
      for (std::size_t j = 0; j < row.size(); ++j) h[i] += w1[i * row.size() + j] * row[j];
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
      double sum = b2 != nullptr ? b2[i] : 0.0;
      for (std::size_t f = 0; f < width; ++f) sum += w2[i * width + f] * activate(h, f, width);
      y[i] += scale * sum;
    }
  }

  void token(const Weights<double>& w, const OracleInputs& in, std::int64_t t, OracleResult& result) const {
    const auto H = static_cast<std::size_t>(c_.H), W = static_cast<std::size_t>(c_.row_width()), K = static_cast<std::size_t>(c_.K);
    const std::span<const double> x(in.x.data() + static_cast<std::size_t>(t) * H, H);
    const std::span<const std::int32_t> ids(in.ids.data() + static_cast<std::size_t>(t) * K, K);
    const std::vector<double> s = raw_scores(logits(w, x));
    std::vector<double> row(x.begin(), x.end()), y(W, 0.0);
    if (c_.latent > 0) row = matrix_vector(w.latent_down, x, W);
    const std::size_t n1 = static_cast<std::size_t>(activation_input_width(c_.activation, c_.F)), n2 = static_cast<std::size_t>(c_.F);
    for (std::size_t k = 0; k < K; ++k) {
      if (ids[k] < 0) continue;
      const auto e = static_cast<std::size_t>(ids[k]);
      const double scale = weight(s, ids, k);
      result.weights[static_cast<std::size_t>(t) * K + k] = scale;
      mlp(row, w.w1.data() + e * n1 * W, w.w2.data() + e * W * n2, c_.expert_bias ? w.b1.data() + e * n1 : nullptr,
          c_.expert_bias ? w.b2.data() + e * W : nullptr, c_.F, scale, y);
    }
    if (c_.latent > 0) y = matrix_vector(w.latent_up, y, H);
    if (c_.shared_F > 0) mlp(x, w.shared_w1.data(), w.shared_w2.data(), nullptr, nullptr, c_.shared_F, 1.0, y);
    std::copy(y.begin(), y.end(), result.out.begin() + t * c_.H);
  }

  static std::vector<double> matrix_vector(const std::vector<double>& m, std::span<const double> v, std::size_t rows) {
    std::vector<double> out(rows, 0.0);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < v.size(); ++j) out[i] += m[i * v.size() + j] * v[j];
    }
    return out;
  }

  void losses(const Weights<double>& w, const OracleInputs& in, std::int64_t T, OracleResult& result) const {
    const auto H = static_cast<std::size_t>(c_.H), E = static_cast<std::size_t>(c_.E);
    std::vector<double> total(E, 0.0);
    double z = 0, sequences = 0;
    const std::int64_t length = c_.sequence_coefficient > 0 ? c_.sequence_length : std::max<std::int64_t>(T, 1);
    for (std::int64_t begin = 0; begin < T; begin += length) {
      std::vector<double> own(E, 0.0), counts(E, 0.0);
      double tokens = 0;
      for (std::int64_t t = begin; t < begin + length; ++t) {
        if (!in.masked.empty() && in.masked[static_cast<std::size_t>(t)] != 0) continue;
        const std::vector<double> x = logits(w, std::span<const double>(in.x.data() + static_cast<std::size_t>(t) * H, H));
        std::vector<double> s = raw_scores(x);
        double score_sum = 0, exp_sum = 0;
        for (const double value : s) score_sum += value;
        for (const double value : x) exp_sum += std::exp(value);
        for (std::size_t e = 0; e < E; ++e) own[e] += s[e] / score_sum;
        for (std::int64_t k = 0; k < c_.K; ++k) {
          const std::int32_t id = in.ids[static_cast<std::size_t>(t * c_.K + k)];
          if (id >= 0) counts[static_cast<std::size_t>(id)] += 1;
        }
        z += std::log(exp_sum) * std::log(exp_sum);
        tokens += 1;
      }
      sequences += tokens > 0 ? 1 : 0;
      for (std::size_t e = 0; e < E; ++e) {
        total[e] += own[e];
        if (tokens > 0) result.sequence += double(c_.sequence_coefficient) * double(E) / (double(c_.K) * tokens * tokens) * counts[e] * own[e];
      }
    }
    if (sequences > 0) result.sequence /= sequences;  // those with a valid token
    if (in.loss_tokens <= 0) return;
    result.z = double(c_.z_coefficient) * z / in.loss_tokens;
    for (std::size_t e = 0; e < E; ++e) {
      const double base = double(E) / (double(c_.K) * in.loss_tokens) * total[e];
      if (c_.aux_coefficient != 0) result.aux += double(c_.aux_coefficient) * base * in.aux_counts[e] / in.aux_tokens;
      if (c_.global_coefficient != 0) result.global += double(c_.global_coefficient) * base * in.global_counts[e] / in.global_tokens;
    }
  }

  MoeConfig c_;
};

}  // namespace waybill::test
