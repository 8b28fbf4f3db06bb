// SPDX-License-Identifier: Apache-2.0
// The layer against the double-precision oracle: values, and every gradient against central differences of the oracle.
#include <gtest/gtest.h>

#include "moe/harness.h"

namespace waybill::test {
namespace {

// fp32 arithmetic on values of order 1, and differences of a double function with step 1e-5.
constexpr double kTolerance = 3e-5;

void expect_close(const std::vector<float>& actual, const std::vector<double>& expected, const std::string& what) {
  EXPECT_LE(relative_error(actual, expected), kTolerance) << what;
}

void compare_with_oracle(const MoeConfig& c, const Weights<float>& w, const Batch& batch, const Result& r) {
  const Oracle oracle(c);
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, r.ids);
  const OracleResult expected = oracle.forward(wd, in);
  expect_close(r.out, expected.out, "out");
  expect_close(r.weights, expected.weights, "routing weights");
  const double loss_bound = 1e-5;
  EXPECT_NEAR(r.losses.aux, expected.aux, loss_bound);
  EXPECT_NEAR(r.losses.sequence, expected.sequence, loss_bound);
  EXPECT_NEAR(r.losses.z, expected.z, loss_bound * 10);
  EXPECT_NEAR(r.global_loss, expected.global, loss_bound);
  expect_close(r.dx, oracle.gradient(wd, in, in.x, batch.d_out, batch.loss_scale), "dx");
  std::vector<std::pair<std::string, std::vector<float>>> gradients;
  Weights<float> copy = r.gradients;
  copy.for_each([&](const char* name, std::vector<float>& v) { gradients.emplace_back(name, v); });
  std::size_t next = 0;
  wd.for_each([&](const char* name, std::vector<double>& values) {
    ASSERT_EQ(gradients[next].first, name);
    expect_close(gradients[next++].second, oracle.gradient(wd, in, values, batch.d_out, batch.loss_scale), name);
  });
}

struct Choice {
  ScoreFunction score;
  bool renormalise;
  Activation activation;
};

std::vector<Choice> choices() {
  std::vector<Choice> all;
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const bool renormalise : {false, true}) {
      for (const Activation activation : {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared})
        all.push_back({score, renormalise, activation});
    }
  }
  return all;
}

MoeConfig config_of(const Choice& choice) {
  MoeConfig c = small_config();
  c.router.score = choice.score;
  c.router.renormalise = choice.renormalise;
  c.router.scaling_factor = 1.5f;
  c.activation.kind = choice.activation;
  c.activation.limit = 0.8f;  // so that both clamps are met
  return c;
}

std::string name_of(const Choice& c, int features) {
  return fmt::format("score {} renormalise {} activation {} features {}", static_cast<int>(c.score), c.renormalise, static_cast<int>(c.activation), features);
}

// Every score x renormalise x activation with every subset of {expert biases, shared expert, latent width}, alone and on 2 ranks.
TEST(MoeOracle, EveryActivationScoreBiasSharedAndLatentCombination) {
  std::uint64_t seed = 100;
  for (const Choice& choice : choices()) {
    for (int features = 0; features < 8; ++features) {
      SCOPED_TRACE(name_of(choice, features) + fmt::format(" seed {}", ++seed));
      MoeConfig c = config_of(choice);
      c.expert_bias = (features & 1) != 0;
      c.shared_F = (features & 2) != 0 ? 2 : 0;
      c.latent = (features & 4) != 0 ? 4 : 0;
      const Weights<float> w = random_weights(c, seed * 100, /*router_bias=*/choice.score == ScoreFunction::kSigmoid);
      const Batch batch = random_batch(c, features % 2 == 0 ? std::vector<std::int64_t>{5} : std::vector<std::int64_t>{2, 3}, seed * 100 + 50);
      compare_with_oracle(c, w, batch, run_layer(c, w, batch));
    }
  }
}

TEST(MoeOracle, EveryLossWithEveryScoreAndPadding) {
  std::uint64_t seed = 900;
  for (const Choice& choice : choices()) {
    if (choice.activation != Activation::kSwiGLU) continue;
    for (const int padding : {0, 1, 2}) {
      SCOPED_TRACE(name_of(choice, padding) + fmt::format(" seed {}", ++seed));
      MoeConfig c = config_of(choice);
      c.aux_coefficient = 0.3f, c.sequence_coefficient = 0.2f, c.global_coefficient = 0.15f, c.z_coefficient = 0.1f;
      c.sequence_length = 2;
      const Weights<float> w = random_weights(c, seed * 100);
      Batch batch = random_batch(c, {4, 2}, seed * 100 + 50);
      batch.loss_scale = 0.7f;
      if (padding == 1) batch.mask = {0, 0, 0, 1, 0, 1};
      if (padding == 2) batch.mask = {0, 1, 1, 1, 0, 0};  // a sequence of padding only is no sequence
      compare_with_oracle(c, w, batch, run_layer(c, w, batch));
    }
  }
}

TEST(MoeOracle, GlobalLossAloneUsesTheAccumulatedCounts) {
  MoeConfig c = small_config();
  c.global_coefficient = 0.5f;
  const Weights<float> w = random_weights(c, 4100);
  const Batch batch = random_batch(c, {3, 2}, 4150);
  const std::vector<std::int64_t> earlier{7, 0, 5, 4};
  RunOptions options;
  options.forward.accumulated_counts = &earlier;
  options.forward.accumulated_tokens = 8;
  options.forward.loss_tokens = 13;
  const Result r = run_layer(c, w, batch, options);
  const Oracle oracle(c);
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, r.ids);
  for (std::size_t e = 0; e < 4; ++e) in.global_counts[e] += static_cast<double>(earlier[e]);
  in.global_tokens = 13, in.loss_tokens = 13;
  EXPECT_NEAR(r.global_loss, oracle.forward(wd, in).global, 1e-6);
  EXPECT_EQ(r.losses.aux, 0.0);
  expect_close(r.gradients.gate, oracle.gradient(wd, in, wd.gate, batch.d_out, 1.0), "gate");
}

TEST(MoeOracle, UnbiasedCountsFeedTheLossWhenAskedFor) {
  MoeConfig c = small_config(4, 1);
  c.router.score = ScoreFunction::kSigmoid;
  c.aux_coefficient = 1.0f;
  Weights<float> w = random_weights(c, 4200);
  w.bias = {0.0f, 0.0f, 0.0f, 5.0f};  // every token goes to expert 3
  const Batch batch = random_batch(c, {4, 3}, 4250);
  c.aux_counts = AuxCounts::kDispatch;
  const Result dispatch = run_layer(c, w, batch);
  c.aux_counts = AuxCounts::kUnbiased;
  const Result unbiased = run_layer(c, w, batch);
  EXPECT_EQ(dispatch.counts, (std::vector<std::int64_t>{0, 0, 0, 7}));
  EXPECT_EQ(unbiased.counts, dispatch.counts);  // the load is the load

  const Oracle oracle(c);
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, unbiased.ids);
  EXPECT_NEAR(dispatch.losses.aux, oracle.forward(wd, in).aux, 1e-6);
  Weights<double> plain = wd;
  plain.bias.clear();
  std::fill(in.aux_counts.begin(), in.aux_counts.end(), 0.0);
  for (std::size_t t = 0; t < 7; ++t) in.aux_counts[static_cast<std::size_t>(oracle.choose(plain, std::span(in.x).subspan(t * 6, 6)).front())] += 1;
  EXPECT_NEAR(unbiased.losses.aux, oracle.forward(wd, in).aux, 1e-6);
  EXPECT_GT(std::abs(unbiased.losses.aux - dispatch.losses.aux), 1e-3);
}

TEST(MoeOracle, TheChosenExpertsAreThoseOfAPlainSort) {
  for (const bool groups : {false, true}) {
    MoeConfig c = small_config(8, 2);
    c.router.score = ScoreFunction::kSigmoid;
    if (groups) c.router.num_groups = 4, c.router.num_kept_groups = 2;
    const Weights<float> w = random_weights(c, 4300, /*router_bias=*/true);
    const Batch batch = random_batch(c, {20, 12}, 4350);
    const Result r = run_layer(c, w, batch);
    const Weights<double> wd = to_double(w);
    const std::vector<double> x(batch.x.begin(), batch.x.end());
    for (std::size_t t = 0; t < 32; ++t) {
      const std::vector<std::int32_t> expected = Oracle(c).choose(wd, std::span(x).subspan(t * 6, 6));
      EXPECT_EQ(std::vector<std::int32_t>(r.ids.begin() + static_cast<std::ptrdiff_t>(2 * t), r.ids.begin() + static_cast<std::ptrdiff_t>(2 * t + 2)), expected)
          << "token " << t << " groups " << groups << " seed 4300";
    }
    compare_with_oracle(c, w, batch, r);
  }
}

}  // namespace
}  // namespace waybill::test
