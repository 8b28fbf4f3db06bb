// SPDX-License-Identifier: Apache-2.0
// Gradients against central finite differences of an independent model in double, for every combination of score, normalisation,
// groups and losses, with random upstream gradients; and what backward promises besides.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ops/router/router_fixture.h"

namespace waybill {
namespace {

using test::RouterCase;
using test::RouterResult;

// The loss of a router as a function of its logits in double: sum g . w(x) + loss_scale * (aux + sequence + z), ids and counts fixed.
struct Model {
  RouterConfig config;
  RouterLossConfig losses;
  std::int64_t T = 0;
  std::vector<std::int32_t> ids;      // [T * K]
  std::vector<std::uint8_t> padding;  // [T]
  std::vector<std::uint8_t> masked;   // [E]
  std::vector<float> g;               // [T * K]
  double loss_scale = 1;

  double score(double x) const {
    if (config.score == ScoreFunction::kSigmoid) return 1 / (1 + std::exp(-x));
    if (config.score == ScoreFunction::kSqrtSoftplus) return std::sqrt(std::log1p(std::exp(x)));
    return std::exp(x);
  }

  bool exists(const std::vector<double>& x, std::int64_t t, std::int64_t e) const {
    return std::isfinite(x[static_cast<std::size_t>(t * config.E + e)]) && masked[static_cast<std::size_t>(e)] == 0;
  }

  double task(const std::vector<double>& x, std::int64_t t) const {
    const bool renormalised = config.renormalise || config.score == ScoreFunction::kSoftmaxSelected;
    double over = config.normalise_epsilon;
    if (renormalised) {
      for (std::int64_t k = 0; k < config.K; ++k) {
        const std::int32_t id = ids[static_cast<std::size_t>(t * config.K + k)];
        if (id >= 0) over += score(x[static_cast<std::size_t>(t * config.E + id)]);
      }
    } else if (config.score == ScoreFunction::kSoftmax) {
      for (std::int64_t e = 0; e < config.E; ++e) over += exists(x, t, e) ? score(x[static_cast<std::size_t>(t * config.E + e)]) : 0.0;
    } else {
      over = 1;
    }
    double sum = 0;
    for (std::int64_t k = 0; k < config.K; ++k) {
      const auto i = static_cast<std::size_t>(t * config.K + k);
      if (ids[i] >= 0) sum += g[i] * config.scaling_factor * score(x[static_cast<std::size_t>(t * config.E + ids[i])]) / over;
    }
    return sum;
  }

  // sum_e n_e P_te
  double load(const std::vector<double>& x, std::int64_t t, const std::vector<double>& n) const {
    double sum = 0, dot = 0;
    for (std::int64_t e = 0; e < config.E; ++e) {
      if (!exists(x, t, e)) continue;
      const double s = score(x[static_cast<std::size_t>(t * config.E + e)]);
      sum += s;
      dot += n[static_cast<std::size_t>(e)] * s;
    }
    return sum > 0 ? dot / sum : 0;
  }

  double lse(const std::vector<double>& x, std::int64_t t) const {
    double sum = 0;
    for (std::int64_t e = 0; e < config.E; ++e) sum += exists(x, t, e) ? std::exp(x[static_cast<std::size_t>(t * config.E + e)]) : 0.0;
    return sum > 0 ? std::log(sum) : 0;
  }

  struct Values {
    double task = 0, aux = 0, sequence = 0, z = 0;
  };

  Values values(const std::vector<double>& x) const {
    Values v;
    double tokens = 0;
    for (const std::uint8_t p : padding) tokens += p == 0;
    const std::int64_t length = losses.sequence_coefficient != 0 ? losses.sequence_length : T;
    double num_sequences = 0;
    for (std::int64_t b = 0; b < T / length; ++b) num_sequences += std::count(padding.begin() + b * length, padding.begin() + (b + 1) * length, 0) > 0;
    const std::vector<double> n = counts(0, T);
    const double ek = static_cast<double>(config.E) / static_cast<double>(config.K);
    for (std::int64_t t = 0; t < T; ++t) {
      if (padding[static_cast<std::size_t>(t)] != 0) continue;
      const std::int64_t b = t / length;
      const auto local_tokens = static_cast<double>(std::count(padding.begin() + b * length, padding.begin() + (b + 1) * length, 0));
      v.task += task(x, t);
      v.aux += losses.aux_coefficient * ek / (tokens * tokens) * load(x, t, n);
      if (losses.sequence_coefficient != 0) {
        v.sequence += losses.sequence_coefficient * ek / (local_tokens * local_tokens) / num_sequences * load(x, t, counts(b * length, (b + 1) * length));
      }
      v.z += losses.z_coefficient / tokens * lse(x, t) * lse(x, t);
    }
    return v;
  }

  double value(const std::vector<double>& x) const {
    const Values v = values(x);
    return v.task + loss_scale * (v.aux + v.sequence + v.z);
  }

  std::vector<double> counts(std::int64_t begin, std::int64_t end) const {
    std::vector<double> n(static_cast<std::size_t>(config.E), 0.0);
    for (std::int64_t i = begin * config.K; i < end * config.K; ++i) {
      const std::int32_t id = ids[static_cast<std::size_t>(i)];
      if (id >= 0) n[static_cast<std::size_t>(id)] += 1;
    }
    return n;
  }
};

struct Combination {
  ScoreFunction score;
  bool renormalise;
  float epsilon;
  bool groups;
  int losses;  // bits: aux, sequence, z
};

std::vector<Combination> all_combinations() {
  std::vector<Combination> list;
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const bool renormalise : {true, false}) {
      for (const float epsilon : {0.0f, 0.05f}) {
        if (epsilon > 0 && (!renormalise || score < ScoreFunction::kSigmoid)) continue;
        for (const bool groups : {false, true}) {
          for (int losses = 0; losses < 8; ++losses) list.push_back({score, renormalise, epsilon, groups, losses});
        }
      }
    }
  }
  return list;
}

class RouterGradients : public ::testing::TestWithParam<const char*> {
 protected:
  test::ForceRouter force_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Implementations, RouterGradients, ::testing::Values("ref", "fast"), [](const auto& suite) { return std::string(suite.param); });

TEST_P(RouterGradients, EqualFiniteDifferencesInEveryCombination) {
  std::uint64_t seed = 100;
  for (const Combination& combination : all_combinations()) {
    SCOPED_TRACE(fmt::format("score {} renormalise {} epsilon {} groups {} losses {}", static_cast<int>(combination.score), combination.renormalise,
                             combination.epsilon, combination.groups, combination.losses));
    constexpr std::int64_t kT = 6, kE = 20, kK = 3;
    RouterCase c(kE, kK, combination.score, test::normal_logits(kT, kE, ++seed, 1.5f));
    c.config.renormalise = combination.renormalise;
    c.config.normalise_epsilon = combination.epsilon;
    c.config.scaling_factor = 1.75f;
    for (std::size_t e = 0; e < kE; ++e) c.bias.push_back(0.4f * random_normal(seed + 1000, e));
    if (combination.groups) {
      c.config.num_groups = 4;
      c.config.num_kept_groups = 2;
    }
    c.padding_mask.assign(kT, 0);
    c.padding_mask[1] = 1;
    c.expert_mask.assign(kE, 0);
    c.expert_mask[7] = 1;
    c.logits[2 * kE + 4] = std::numeric_limits<float>::quiet_NaN();
    c.logits[3 * kE + 5] = -std::numeric_limits<float>::infinity();
    const RouterResult result = test::forward(c);

    Model model;
    model.config = c.config;
    model.losses.aux_coefficient = (combination.losses & 1) != 0 ? 0.7f : 0.0f;
    model.losses.sequence_coefficient = (combination.losses & 2) != 0 ? 0.4f : 0.0f;
    model.losses.z_coefficient = (combination.losses & 4) != 0 ? 0.3f : 0.0f;
    model.losses.sequence_length = 3;
    model.T = kT;
    model.padding = c.padding_mask;
    model.masked = c.expert_mask;
    model.loss_scale = 1.5;
    for (std::int64_t i = 0; i < kT * kK; ++i) {
      model.ids.push_back(result.route.view().id(i / kK, i % kK));
      model.g.push_back(random_normal(seed + 2000, static_cast<std::uint64_t>(i)));
    }
    const std::vector<float> d = test::backward(c, model.losses, result.route, model.g, {}, 1.5f);

    std::vector<double> x(c.logits.begin(), c.logits.end());
    const Model::Values values = model.values(x);
    const RouterLosses losses = test::losses(c, model.losses, result.route);
    EXPECT_NEAR(losses.aux, values.aux, 1e-6 * values.aux);
    EXPECT_NEAR(losses.sequence, values.sequence, 1e-6 * values.sequence);
    EXPECT_NEAR(losses.z, values.z, 1e-6 * values.z);
    double largest = 0;
    for (const float v : d) largest = std::max(largest, std::abs(static_cast<double>(v)));
    ASSERT_GT(largest, 1e-3);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double keep = x[i], h = 1e-5;
      double want = 0;
      if (std::isfinite(keep)) {
        x[i] = keep + h;
        const double up = model.value(x);
        x[i] = keep - h;
        const double down = model.value(x);
        x[i] = keep;
        want = (up - down) / (2 * h);
      }
      ASSERT_NEAR(d[i], want, 2e-6 * largest + 1e-9) << "element " << i;
      if (!std::isfinite(keep) || i / kE == 1 || i % kE == 7) {
        ASSERT_EQ(d[i], 0.0f) << "element " << i;
      }
    }
  }
}

TEST_P(RouterGradients, TinyScoresStillHaveAnExactDistribution) {
  // All logits near -60: the full scores sum to 1, so the losses and their gradients are those of a softmax.
  for (const ScoreFunction score : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    RouterCase c(12, 3, score, test::normal_logits(8, 12, 71));
    for (float& x : c.logits) x -= 120.0f;
    RouterCase softmax = c;
    softmax.config.score = ScoreFunction::kSoftmax;
    if (score == ScoreFunction::kSqrtSoftplus) {
      for (float& x : softmax.logits) x = 0.5f * x;  // s = e^(x/2)
    }
    RouterLossConfig config;
    config.aux_coefficient = 1;
    const RouterResult result = test::forward(c);
    const double loss = test::losses(c, config, result.route).aux;
    EXPECT_NEAR(loss, test::losses(softmax, config, result.route).aux, 1e-5 * loss);
    EXPECT_GT(loss, 0.5);  // an added constant would let it fade to 0
    const std::vector<float> d = test::backward(c, config, result.route, {});
    const std::vector<float> want = test::backward(softmax, config, result.route, {});
    const float slope = score == ScoreFunction::kSqrtSoftplus ? 0.5f : 1.0f;
    for (std::size_t i = 0; i < d.size(); ++i) ASSERT_NEAR(d[i], slope * want[i], 1e-7) << "element " << i;
  }
}

TEST_P(RouterGradients, ClosedFormsOfTheLosses) {
  RouterLossConfig config;
  config.aux_coefficient = config.z_coefficient = 1;
  RouterCase uniform(4, 2, ScoreFunction::kSigmoid, std::vector<float>(8 * 4, 0.0f));
  uniform.config.forced_balance = ForcedBalance::kRoundRobin;
  const RouterLosses losses = test::losses(uniform, config, test::forward(uniform).route);
  EXPECT_NEAR(losses.aux, 1.0, 1e-6);
  EXPECT_NEAR(losses.z, std::log(4.0) * std::log(4.0), 1e-6);
  std::vector<float> x;
  for (int t = 0; t < 8; ++t) x.insert(x.end(), {0, -200, -200, -200});
  const RouterCase one(4, 1, ScoreFunction::kSoftmax, x);
  EXPECT_NEAR(test::losses(one, config, test::forward(one).route).aux, 4.0, 1e-6);
  RouterCase pair(4, 2, ScoreFunction::kSoftmax, x);
  pair.replay.resize(16);
  for (std::size_t i = 0; i < 16; ++i) pair.replay[i] = static_cast<std::int32_t>(i % 2);
  EXPECT_NEAR(test::losses(pair, config, test::forward(pair).route).aux, 2.0, 1e-6);
}

RouterLossConfig all_losses(std::int64_t length) {
  RouterLossConfig config;
  config.aux_coefficient = 0.5f;
  config.sequence_coefficient = 0.25f;
  config.z_coefficient = 0.125f;
  config.sequence_length = length;
  return config;
}

TEST(RouterBackward, FastEqualsReferenceOnEveryScoreTypeAndSize) {
  std::uint64_t seed = 500;
  for (const std::int64_t E : {1, 8, 60, 256, 1025}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        const std::int64_t K = std::min<std::int64_t>(E, 6);
        RouterCase c(E, K, score, test::normal_logits(24, E, ++seed, 3.0f));
        c.dtype = dtype;
        c.stride = E + 3;
        c.config.renormalise = seed % 2 == 0;
        std::vector<float> g(static_cast<std::size_t>(24 * K));
        for (std::size_t i = 0; i < g.size(); ++i) g[i] = random_normal(seed + 7, i);
        const RouterResult result = test::forward(c);
        std::vector<float> ref, fast;
        RouterLosses ref_losses, fast_losses;
        {
          const test::ForceRouter force("ref");
          ref = test::backward(c, all_losses(8), result.route, g);
          ref_losses = test::losses(c, all_losses(8), result.route);
        }
        {
          const test::ForceRouter force("fast");
          fast = test::backward(c, all_losses(8), result.route, g);
          fast_losses = test::losses(c, all_losses(8), result.route);
        }
        float largest = 1e-6f;
        for (const float v : ref) largest = std::max(largest, std::abs(v));
        for (std::size_t i = 0; i < ref.size(); ++i) ASSERT_NEAR(fast[i], ref[i], 1e-6f * largest) << "E " << E << " element " << i;
        EXPECT_NEAR(fast_losses.aux, ref_losses.aux, 1e-6 * ref_losses.aux);
        EXPECT_NEAR(fast_losses.sequence, ref_losses.sequence, 1e-6 * ref_losses.sequence);
        EXPECT_NEAR(fast_losses.z, ref_losses.z, 1e-6 * ref_losses.z);
      }
    }
  }
}

TEST(RouterBackward, ResultsAreTheSameBitsForAnyPool) {
  RouterCase c(256, 8, ScoreFunction::kSigmoid, test::normal_logits(512, 256, 81));
  const RouterResult result = test::forward(c);
  std::vector<float> g(512 * 8, 0.5f);
  const std::vector<float> alone = test::backward(c, all_losses(128), result.route, g);
  const RouterLosses losses = test::losses(c, all_losses(128), result.route);
  for (const int threads : {2, 3, 5}) {
    ThreadPool pool(threads);
    const std::vector<float> many = test::backward(c, all_losses(128), result.route, g, {}, 1.0f, Stream::cpu(&pool));
    EXPECT_EQ(std::memcmp(many.data(), alone.data(), alone.size() * sizeof(float)), 0);
    const RouterLosses again = test::losses(c, all_losses(128), result.route, {}, Stream::cpu(&pool));
    EXPECT_EQ(again.aux, losses.aux);
    EXPECT_EQ(again.sequence, losses.sequence);
    EXPECT_EQ(again.z, losses.z);
  }
}

TEST(RouterBackward, NothingOfTheSizeTByEIsAllocated) {
  constexpr std::int64_t kT = 2048, kE = 128;
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    RouterCase c(kE, 8, score, test::normal_logits(kT, kE, 91));
    c.config.renormalise = false;
    const test::StoredInputs stored(c);
    const Route route(kT, 8, kE);
    const Tensor d_logits(DType::kF32, {kT, kE});
    const std::vector<float> g(kT * 8, 1.0f);
    std::vector<std::int32_t> unbiased(kE);
    ThreadPool pool(2);
    const AllocationTrace trace;
    RouterOutputs outputs{route.view()};
    outputs.counts_unbiased = unbiased.data();
    router_forward(c.config, stored.inputs, outputs, Stream::cpu(&pool));
    router_losses(c.config, all_losses(256), stored.inputs, route.view(), {}, Stream::cpu(&pool));
    router_backward(c.config, all_losses(256), stored.inputs, route.view(), g.data(), {}, 1.0f, d_logits.view(), Stream::cpu(&pool));
    EXPECT_GT(trace.count(), 0u);
    EXPECT_LT(trace.largest_bytes(), static_cast<std::size_t>(kT * kE) / 8) << "a quarter bit per (token, expert) would already be suspicious";
  }
}

TEST(RouterBackward, BadArgumentsAreRefusedBeforeAnythingIsWritten) {
  RouterCase c(8, 2, ScoreFunction::kSoftmax, test::normal_logits(6, 8, 1));
  const RouterResult result = test::forward(c);
  const test::StoredInputs stored(c);
  std::vector<float> d(48, -77.0f);
  const TensorView d_logits = TensorView::of(d.data(), {6, 8});
  const auto expect_refused = [&](const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const TensorView& out) {
    EXPECT_THROW(router_backward(config, losses, inputs, result.route.view(), nullptr, {}, 1.0f, out), Error);
    EXPECT_EQ(d, std::vector<float>(48, -77.0f));
  };
  expect_refused(c.config, all_losses(4), stored.inputs, d_logits);  // 6 rows are no whole sequences of 4
  expect_refused(c.config, {}, stored.inputs, TensorView::of(d.data(), {8, 6}));
  RouterInputs wrong = stored.inputs;
  wrong.padding_mask = TensorView::of(reinterpret_cast<std::uint8_t*>(d.data()), {5});
  expect_refused(c.config, {}, wrong, d_logits);
  RouterConfig epsilon = c.config;
  epsilon.normalise_epsilon = 1e-20f;
  expect_refused(epsilon, {}, stored.inputs, d_logits);
  RouterConfig other_k = c.config;
  other_k.K = 3;
  expect_refused(other_k, {}, stored.inputs, d_logits);
}

TEST(RouterImplementations, NobodyTakesADeviceTensorWithoutABackendAndEveryRefusalIsListed) {
  RouterConfig config;
  config.E = 4;
  config.K = 2;
  float x[8] = {};
  std::int16_t ids[4] = {};
  float weights[4] = {};
  RouterInputs inputs;
  inputs.logits = TensorView(x, DType::kF32, {2, 4}, Device{DeviceType::kCuda, 0});
  RouteView route{2, 2, 4, DType::kI16, ids, weights, nullptr, Device{DeviceType::kCuda, 0}};
  try {
    router_forward(config, inputs, {route});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "no implementation of router accepts this call (cuda: no CUDA backend is linked; cuda_portable: no CUDA backend is linked; "
                 "fast: takes host memory, got cuda:0; ref: takes host memory, got cuda:0)");
  }
}

TEST(RouterImplementations, AForcedNameMustExistAndAccept) {
  const RouterCase c(4, 2, ScoreFunction::kSoftmax, test::normal_logits(2, 4, 1));
  {
    const test::ForceRouter force("fastest");
    EXPECT_THROW(test::forward(c), Error);
  }
  const test::ForceRouter force("cuda");
  EXPECT_THROW(test::forward(c), Error);
}

}  // namespace
}  // namespace waybill
