// SPDX-License-Identifier: Apache-2.0
// Field cases about routing, losses and counters, seen through the whole layer (ranks are threads).
#include <gtest/gtest.h>

#include "moe/harness.h"
#include "waybill/balance.h"

namespace waybill::test {
namespace {

// A layer whose logits are written down: H = E, and row e of the gate reads column e of x. Experts return 0.
MoeConfig readable_config(std::int64_t E, std::int64_t K) {
  MoeConfig c = small_config(E, K, E, 2);
  c.router.renormalise = false;
  return c;
}

Weights<float> readable_weights(const MoeConfig& c) {
  Weights<float> w = random_weights(c, 1);
  std::fill(w.gate.begin(), w.gate.end(), 0.0f);
  for (std::int64_t e = 0; e < c.E; ++e) w.gate[static_cast<std::size_t>(e * c.H + e)] = 1.0f;
  std::fill(w.w2.begin(), w.w2.end(), 0.0f);
  return w;
}

void expect_near(std::span<const float> actual, std::vector<double> expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
}

// Column `column` of the gate's gradient: sum over tokens of d_logit[e] * x[column].
std::vector<float> gate_column(const MoeConfig& c, const Result& r, std::int64_t column) {
  std::vector<float> values;
  for (std::int64_t e = 0; e < c.E; ++e) values.push_back(r.gradients.gate[static_cast<std::size_t>(e * c.H + column)]);
  return values;
}

TEST(MoeFieldCases, F04_TaskGradientReachesTheRouterOnlyWithoutRenormalisation) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const bool renormalise : {true, false}) {
      for (const std::int64_t T : {1, 7, 64}) {
        SCOPED_TRACE(fmt::format("score {} renormalise {} T {}", static_cast<int>(score), renormalise, T));
        MoeConfig c = small_config(4, 1, 1, 1);
        c.router.score = score;
        c.router.renormalise = renormalise;
        c.activation.kind = Activation::kReluSquared;
        Weights<float> w = random_weights(c, 2);
        w.gate = {1, 0, 0, 0};
        std::fill(w.w1.begin(), w.w1.end(), 1.0f);  // every expert returns 1: d_weight is 1
        std::fill(w.w2.begin(), w.w2.end(), 1.0f);
        Batch batch = random_batch(c, {T}, 3);
        std::fill(batch.x.begin(), batch.x.end(), 1.0f);
        std::fill(batch.d_out.begin(), batch.d_out.end(), 1.0f);
        const Result r = run_layer(c, w, batch);
        const bool softmax = score == ScoreFunction::kSoftmax;
        for (const float weight : r.weights) EXPECT_NEAR(weight, renormalise ? 1.0 : softmax ? 0.475367 : 0.731059, renormalise ? 0 : 1e-6);
        std::vector<double> expected{0, 0, 0, 0};
        if (!renormalise && softmax) expected = {0.249393, -0.083131, -0.083131, -0.083131};
        if (!renormalise && !softmax) expected = {0.196612, 0, 0, 0};
        for (double& value : expected) value *= static_cast<double>(T);
        expect_near(r.gradients.gate, expected, renormalise ? 0 : 1e-6 * static_cast<double>(T));
      }
    }
  }
}

// Valid rows have logits 0; padding rows have logit 10 at expert 0.
Batch padded_batch(const MoeConfig& c, std::int64_t T, std::int64_t valid, bool split) {
  Batch batch = random_batch(c, split ? std::vector<std::int64_t>{T / 2 - 1, T - T / 2 + 1} : std::vector<std::int64_t>{T}, 5);
  std::fill(batch.x.begin(), batch.x.end(), 0.0f);
  batch.mask.assign(static_cast<std::size_t>(T), 0);
  for (std::int64_t t = 0; t < T; ++t) {
    batch.replay.push_back(t < valid ? static_cast<std::int32_t>(t % 4) : 0);
    if (t >= valid) batch.mask[static_cast<std::size_t>(t)] = 1, batch.x[static_cast<std::size_t>(t * c.H)] = 10.0f;
  }
  return batch;
}

TEST(MoeFieldCases, F07_PaddedBatchHasTheLossesAndCountsOfItsValidRows) {
  for (const bool split : {false, true}) {
    MoeConfig c = readable_config(4, 1);
    c.aux_coefficient = 1.0f, c.z_coefficient = 1.0f;
    const Result a = run_layer(c, readable_weights(c), padded_batch(c, 8, 4, split));
    EXPECT_NEAR(a.losses.aux, 1.0, 1e-6);
    EXPECT_NEAR(a.losses.z, 1.921812, 2e-6);
    EXPECT_EQ(a.counts, (std::vector<std::int64_t>{1, 1, 1, 1}));
    EXPECT_EQ(a.ids, (std::vector<std::int32_t>{0, 1, 2, 3, -1, -1, -1, -1}));
    std::vector<float> bias{0.5f, 0.5f, 0.5f, 0.5f};
    update_expert_bias(bias, a.counts, 0.001f);
    EXPECT_EQ(bias, (std::vector<float>{0.5f, 0.5f, 0.5f, 0.5f}));
    for (std::size_t i = 16; i < 32; ++i) {
      EXPECT_EQ(a.out[i], 0.0f);
      EXPECT_EQ(a.dx[i], 0.0f);
    }
    for (std::size_t t = 4; t < 8; ++t) EXPECT_EQ(a.weights[t], 0.0f);
    expect_near(gate_column(c, a, 0), {0, 0, 0, 0}, 0);  // only padding rows have x[0] != 0: their logits' gradient is exactly 0

    const Result b = run_layer(c, readable_weights(c), padded_batch(c, 64, 32, split));
    EXPECT_NEAR(b.losses.aux, 1.0, 1e-6);
    EXPECT_EQ(b.counts, (std::vector<std::int64_t>{8, 8, 8, 8}));
  }
}

TEST(MoeFieldCases, F07_PaddedBatchTrainsLikeTheUnpaddedOne) {
  MoeConfig c = small_config(4, 2);
  c.aux_coefficient = 0.5f, c.z_coefficient = 0.1f;
  const Weights<float> w = random_weights(c, 70);
  Batch padded = random_batch(c, {5, 6}, 71), plain;
  padded.mask = {0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0};
  plain.tokens = {3, 3};
  for (std::size_t t = 0; t < 11; ++t) {
    for (std::size_t h = 0; h < 6 && padded.mask[t] == 0; ++h) {
      plain.x.push_back(padded.x[t * 6 + h]);
      plain.d_out.push_back(padded.d_out[t * 6 + h]);
    }
  }
  const Result a = run_layer(c, w, padded), b = run_layer(c, w, plain);
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_NEAR(a.losses.aux, b.losses.aux, 1e-7);
  EXPECT_NEAR(a.losses.z, b.losses.z, 1e-7);
  EXPECT_LE(relative_error(a.gradients.gate, b.gradients.gate), 1e-6);
  EXPECT_LE(relative_error(a.gradients.w1, b.gradients.w1), 1e-6);
  EXPECT_LE(relative_error(a.gradients.w2, b.gradients.w2), 1e-6);
  std::vector<float> out, dx;
  for (std::size_t i = 0; i < a.out.size(); ++i) {
    if (padded.mask[i / 6] == 0)
      out.push_back(a.out[i]), dx.push_back(a.dx[i]);
    else
      EXPECT_EQ(a.out[i], 0.0f);
  }
  EXPECT_LE(relative_error(out, b.out), 1e-6);
  EXPECT_LE(relative_error(dx, b.dx), 1e-6);
}

TEST(MoeFieldCases, F07_BatchOfOnlyPaddingTouchesNothing) {
  MoeConfig c = readable_config(4, 1);
  c.aux_coefficient = c.z_coefficient = c.global_coefficient = c.sequence_coefficient = 1.0f;
  c.sequence_length = 2;
  const Result r = run_layer(c, readable_weights(c), padded_batch(c, 8, 0, false));
  EXPECT_EQ(r.losses.aux, 0.0);
  EXPECT_EQ(r.losses.z, 0.0);
  EXPECT_EQ(r.losses.sequence, 0.0);
  EXPECT_EQ(r.global_loss, 0.0);
  EXPECT_EQ(r.counts, (std::vector<std::int64_t>{0, 0, 0, 0}));
  std::vector<float> bias{0.1f, -0.2f, 0.3f, 0.4f};
  update_expert_bias(bias, r.counts, 0.001f);
  EXPECT_EQ(bias, (std::vector<float>{0.1f, -0.2f, 0.3f, 0.4f}));
  for (const float value : r.dx) EXPECT_EQ(value, 0.0f);
  for (const float value : r.gradients.gate) EXPECT_EQ(value, 0.0f);
}

// Logits of part b of F09 with a constant column that reads off the gradient: x = [1, one-hot], gate = [0 | ln 7 I].
struct LayoutCase {
  MoeConfig c;
  Weights<float> w;
  Batch batch;
};

LayoutCase f09_part_b() {
  LayoutCase f{small_config(4, 1, 5, 2), {}, {}};
  f.c.router.renormalise = false;
  f.c.aux_coefficient = 1.0f;
  f.w = random_weights(f.c, 90);
  std::fill(f.w.gate.begin(), f.w.gate.end(), 0.0f);
  std::fill(f.w.w2.begin(), f.w.w2.end(), 0.0f);
  for (std::size_t e = 0; e < 4; ++e) f.w.gate[e * 5 + 1 + e] = static_cast<float>(std::log(7.0));
  f.batch = random_batch(f.c, {8}, 91);
  std::fill(f.batch.x.begin(), f.batch.x.end(), 0.0f);
  std::fill(f.batch.d_out.begin(), f.batch.d_out.end(), 0.0f);
  for (std::size_t t = 0; t < 8; ++t) f.batch.x[t * 5] = 1.0f, f.batch.x[t * 5 + 1 + (t < 4 ? 0 : t - 4)] = 1.0f;
  return f;
}

// Sum over ranks and micro-batches of losses and gate gradients. ep_size 1 with more ranks is plain data parallelism.
struct LossSums {
  double aux = 0, z = 0;
  std::vector<float> gate;
};

LossSums run_replicated(const LayoutCase& f, int replicas, int micro_batches) {
  const std::int64_t T = f.batch.T() / replicas;
  LossSums sums;
  sums.gate.assign(f.w.gate.size(), 0.0f);
  std::mutex mutex;
  run_ranks(replicas, [&](Fabric& world) {
    const std::unique_ptr<Fabric> ep = make_single_fabric();
    MoeLayer layer(f.c, *ep, world);
    Batch mine = f.batch;
    mine.tokens = {T};
    mine.x.assign(f.batch.x.begin() + world.rank() * T * f.c.H, f.batch.x.begin() + (world.rank() + 1) * T * f.c.H);
    mine.d_out.resize(mine.x.size());
    RankRun rank(f.c, 1, 0, f.w, mine);
    RunOptions options;
    options.forward.loss_tokens = static_cast<double>(f.batch.T() * micro_batches);
    for (int m = 0; m < micro_batches; ++m) {
      rank.run(layer, f.c, mine, options);
      const std::lock_guard lock(mutex);
      sums.aux += rank.step.losses.aux, sums.z += rank.step.losses.z;
    }
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < sums.gate.size(); ++i) sums.gate[i] += rank.gradients.w.gate[i];
  });
  return sums;
}

TEST(MoeFieldCases, F09_ValueAndGateGradientAreThoseOfTheGlobalBatchAtEveryLayout) {
  const LayoutCase f = f09_part_b();
  const std::vector<double> expected{0.33, -0.11, -0.11, -0.11};
  for (const std::vector<std::int64_t>& tokens : std::vector<std::vector<std::int64_t>>{{8}, {4, 4}, {2, 2, 2, 2}, {8, 0}, {1, 2, 0, 5}}) {
    SCOPED_TRACE(fmt::format("expert parallel, tokens {}", fmt::join(tokens, ",")));
    Batch batch = f.batch;
    batch.tokens = tokens;
    const Result r = run_layer(f.c, f.w, batch);
    EXPECT_EQ(r.counts, (std::vector<std::int64_t>{5, 1, 1, 1}));
    EXPECT_NEAR(r.losses.aux, 1.45, 2e-6);
    expect_near(gate_column(f.c, r, 0), expected, 2e-6);
  }
  for (const auto& [replicas, micro_batches] : std::vector<std::pair<int, int>>{{2, 1}, {4, 1}, {1, 2}, {2, 2}}) {
    SCOPED_TRACE(fmt::format("{} replicas, {} micro-batches", replicas, micro_batches));
    const LossSums sums = run_replicated(f, replicas, micro_batches);
    EXPECT_NEAR(sums.aux, 1.45, 2e-6);
    for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(sums.gate[e * 5], expected[e], 2e-6);
  }
}

TEST(MoeFieldCases, F09_UniformScoresWithBalancedLoadGiveOne) {
  for (const int P : {1, 2, 4}) {
    MoeConfig c = small_config(4, 2, 4, 2);
    c.aux_coefficient = 1.0f;
    Weights<float> w = random_weights(c, 95);
    std::fill(w.gate.begin(), w.gate.end(), 0.0f);
    Batch batch = random_batch(c, std::vector<std::int64_t>(static_cast<std::size_t>(P), 16 / P), 96);
    for (std::int32_t i = 0; i < 32; ++i) batch.replay.push_back(i % 4);
    EXPECT_NEAR(run_layer(c, w, batch).losses.aux, 1.0, 1e-6) << "P " << P;
  }
}

TEST(MoeFieldCases, F09_AuxAndZAreTheSameAtEveryLayout) {
  LayoutCase f{small_config(4, 2), {}, {}};
  f.c.aux_coefficient = 0.7f, f.c.z_coefficient = 0.3f;
  f.w = random_weights(f.c, 97);
  f.batch = random_batch(f.c, {8}, 98);
  std::fill(f.batch.d_out.begin(), f.batch.d_out.end(), 0.0f);
  const LossSums one = run_replicated(f, 1, 1);
  for (const auto& [replicas, micro_batches] : std::vector<std::pair<int, int>>{{2, 1}, {4, 1}, {1, 2}, {2, 3}}) {
    const LossSums sums = run_replicated(f, replicas, micro_batches);
    EXPECT_NEAR(sums.aux, one.aux, 1e-6 * one.aux);
    EXPECT_NEAR(sums.z, one.z, 1e-6 * one.z);
    EXPECT_LE(relative_error(sums.gate, one.gate), 1e-6);
  }
}

TEST(MoeFieldCases, F10_AuxLossTrainsTheRouterByItself) {
  MoeConfig c = small_config(4, 1, 4, 2);
  c.router.renormalise = false;
  Weights<float> w = random_weights(c, 100);
  std::fill(w.gate.begin(), w.gate.end(), 0.0f);
  Batch batch = random_batch(c, {4}, 101);
  std::fill(batch.d_out.begin(), batch.d_out.end(), 0.0f);  // task gradient exactly 0
  for (std::size_t t = 0; t < 4; ++t) {
    for (std::size_t h = 0; h < 4; ++h) batch.x[t * 4 + h] = t == h ? 1.0f : 0.0f;  // column t of the gate gradient = row t's d_logits
  }
  c.aux_coefficient = 0.01f;
  const Result r1 = run_layer(c, w, batch);
  EXPECT_NEAR(r1.losses.aux, 0.01, 1e-8);
  c.aux_coefficient = 0.02f;
  const Result r2 = run_layer(c, w, batch);
  for (std::int64_t t = 0; t < 4; ++t) {
    expect_near(gate_column(c, r1, t), {0.001875, -0.000625, -0.000625, -0.000625}, 1e-8);
    expect_near(gate_column(c, r2, t), {0.00375, -0.00125, -0.00125, -0.00125}, 2e-8);
  }
}

TEST(MoeFieldCases, F10_AuxGradientEqualsFiniteDifferencesAndIsLinear) {
  MoeConfig c = small_config(16, 4, 16, 2);
  c.router.renormalise = false;
  Weights<float> w = readable_weights(c);
  Batch batch = random_batch(c, {20, 12}, 111);
  std::fill(batch.d_out.begin(), batch.d_out.end(), 0.0f);
  c.aux_coefficient = 1.0f;
  const Result r1 = run_layer(c, w, batch);
  c.aux_coefficient = 2.0f;
  const Result r2 = run_layer(c, w, batch);
  c.aux_coefficient = 1.0f;
  const Oracle oracle(c);
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, r1.ids);
  const std::vector<double> expected = oracle.gradient(wd, in, in.x, batch.d_out, 1.0);  // x is the logits here
  EXPECT_LE(relative_error(r1.dx, expected), 1e-5);
  for (std::size_t i = 0; i < r1.dx.size(); ++i) EXPECT_NEAR(r2.dx[i], 2.0f * r1.dx[i], 1e-6 * std::abs(r2.dx[i]) + 1e-12);
}

TEST(MoeFieldCases, F11_RecomputeAndEvaluationCountNothingTwice) {
  MoeConfig c = small_config(8, 2, 6, 4);
  c.router.renormalise = false;
  c.aux_coefficient = 1.0f;
  c.latent = 4, c.shared_F = 3, c.expert_bias = true;
  Weights<float> w = random_weights(c, 110);
  std::fill(w.gate.begin(), w.gate.end(), 0.0f);
  for (const std::vector<std::int64_t>& tokens : std::vector<std::vector<std::int64_t>>{{64}, {30, 34}}) {
    Batch batch = random_batch(c, tokens, 112);
    for (std::int32_t i = 0; i < 128; ++i) batch.replay.push_back(i % 8);
    c.recompute = Recompute::kNone;
    const Result plain = run_layer(c, w, batch);
    EXPECT_NEAR(plain.losses.aux, 1.0, 1e-6);
    EXPECT_EQ(plain.counts, std::vector<std::int64_t>(8, 16));
    EXPECT_EQ(std::accumulate(plain.counts.begin(), plain.counts.end(), std::int64_t{0}), 128);
    std::size_t saved = plain.saved_bytes;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
      for (const int evaluations : {0, 2}) {
        SCOPED_TRACE(fmt::format("recompute {} evaluations {} ranks {}", static_cast<int>(recompute), evaluations, tokens.size()));
        c.recompute = recompute;
        RunOptions options;
        options.evaluations_before = evaluations;
        const Result r = run_layer(c, w, batch, options);
        EXPECT_EQ(r.losses.aux, plain.losses.aux);
        EXPECT_EQ(r.counts, plain.counts);
        EXPECT_TRUE(same_bits(r.out, plain.out));
        EXPECT_TRUE(same_bits(r.dx, plain.dx));
        EXPECT_TRUE(same_bits(r.gradients, plain.gradients));
        EXPECT_EQ(r.flops, plain.flops);
        if (recompute != Recompute::kLayer) {
          EXPECT_EQ(r.bytes.payload, plain.bytes.payload);
        }
        if (evaluations == 0 && recompute != Recompute::kNone) {
          EXPECT_LT(r.saved_bytes, saved);
          saved = r.saved_bytes;
        }
      }
    }
  }
}

TEST(MoeFieldCases, F12_DroppedSlotsAndRowsHaveExactlyZeroGradient) {
  MoeConfig c = small_config(2, 2);
  const Weights<float> w = random_weights(c, 120);
  Batch batch = random_batch(c, {4}, 121);
  batch.replay = {0, 1, -1, 0, 1, -1, -1, -1};
  const Result r = run_layer(c, w, batch);
  EXPECT_EQ(r.counts, (std::vector<std::int64_t>{2, 2}));
  for (std::size_t h = 0; h < 6; ++h) {
    EXPECT_EQ(r.out[18 + h], 0.0f);
    EXPECT_EQ(r.dx[18 + h], 0.0f);
  }
  const Oracle oracle(c);
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, batch.replay);
  EXPECT_LE(relative_error(r.dx, oracle.gradient(wd, in, in.x, batch.d_out, 1.0)), 3e-5);
}

}  // namespace
}  // namespace waybill::test
