// SPDX-License-Identifier: Apache-2.0
// The layer gives one answer at every layout: any P, any split of the tokens, any pool, any repeat, hard routes, padding, ETP.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "moe/harness.h"

namespace waybill::test {
namespace {

MoeConfig full_config() {
  MoeConfig c = small_config(8, 3, 10, 6);
  c.router.score = ScoreFunction::kSigmoid;
  c.expert_bias = true;
  c.shared_F = 4;
  c.latent = 6;
  c.aux_coefficient = 0.1f, c.z_coefficient = 0.01f, c.global_coefficient = 0.05f;
  return c;
}

void expect_same_layer(const Result& a, const Result& b, double tolerance) {
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_TRUE(same_bits(a.weights, b.weights));
  EXPECT_LE(relative_error(a.out, b.out), tolerance) << "out";
  EXPECT_LE(relative_error(a.dx, b.dx), tolerance) << "dx";
  Weights<float> left = a.gradients, right = b.gradients;
  std::vector<std::vector<float>> expected;
  right.for_each([&](const char*, std::vector<float>& v) { expected.push_back(v); });
  std::size_t i = 0;
  left.for_each([&](const char* name, std::vector<float>& v) { EXPECT_LE(relative_error(v, expected[i++]), tolerance) << name; });
  EXPECT_NEAR(a.losses.aux, b.losses.aux, 1e-6 * std::abs(b.losses.aux));
  EXPECT_NEAR(a.losses.z, b.losses.z, 1e-6 * std::abs(b.losses.z));
  EXPECT_NEAR(a.global_loss, b.global_loss, 1e-6 * std::abs(b.global_loss));
}

void expect_bit_equal(const Result& a, const Result& b) {
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
  EXPECT_EQ(a.losses.aux, b.losses.aux);
  EXPECT_EQ(a.losses.z, b.losses.z);
}

// The same 24 tokens, split in every way that hurts.
const std::vector<std::vector<std::int64_t>> kSplits = {{12, 12},
                                                        {24, 0},
                                                        {0, 24},
                                                        {1, 23},
                                                        {6, 6, 6, 6},
                                                        {0, 11, 0, 13},
                                                        {24, 0, 0, 0},
                                                        {3, 3, 3, 3, 3, 3, 3, 3},
                                                        {0, 1, 2, 3, 4, 5, 6, 3},
                                                        {0, 0, 0, 0, 0, 0, 0, 24}};

void check_every_split(const MoeConfig& c, const Weights<float>& w, const Batch& batch) {
  const Result one = run_layer(c, w, batch);
  for (const std::vector<std::int64_t>& tokens : kSplits) {
    SCOPED_TRACE(fmt::format("tokens {}", fmt::join(tokens, ",")));
    Batch split = batch;
    split.tokens = tokens;
    const Result r = run_layer(c, w, split);
    expect_same_layer(r, one, 3e-6);
    EXPECT_EQ(std::accumulate(r.slots.begin(), r.slots.end(), std::int64_t{0}), one.slots[0]);
    EXPECT_DOUBLE_EQ(r.flops, one.flops);
  }
}

TEST(MoeLayout, OutputGradientsAndLossesDoNotDependOnTheRanks) {
  const MoeConfig c = full_config();
  check_every_split(c, random_weights(c, 10, true), random_batch(c, {24}, 11));
}

// The rows of `values` [T, width] whose mask is 0.
template <class T>
std::vector<T> unmasked(const std::vector<T>& values, const std::vector<std::uint8_t>& mask) {
  const std::size_t width = values.size() / mask.size();
  std::vector<T> kept;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] == 0)
      kept.insert(kept.end(), values.begin() + static_cast<std::ptrdiff_t>(t * width), values.begin() + static_cast<std::ptrdiff_t>((t + 1) * width));
  }
  return kept;
}

TEST(MoeLayout, PaddingTokensChangeNothingAtAnyLayout) {
  const MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 20, true);
  Batch batch = random_batch(c, {24}, 21);
  batch.mask.assign(24, 0);
  for (const std::size_t t : {0u, 5u, 6u, 7u, 23u}) {
    batch.mask[t] = 1;
    std::fill_n(batch.d_out.begin() + static_cast<std::ptrdiff_t>(t) * c.H, c.H, 0.0f);  // the shared expert sees every row
  }
  check_every_split(c, w, batch);
  // As if they were not there.
  Batch without = batch;
  without.tokens = {19}, without.mask.clear();
  without.x = unmasked(batch.x, batch.mask), without.d_out = unmasked(batch.d_out, batch.mask);
  Result padded = run_layer(c, w, batch);
  padded.ids = unmasked(padded.ids, batch.mask), padded.weights = unmasked(padded.weights, batch.mask);
  padded.out = unmasked(padded.out, batch.mask), padded.dx = unmasked(padded.dx, batch.mask);
  expect_same_layer(padded, run_layer(c, w, without), 3e-6);
}

TEST(MoeLayout, EmptyExpertsAndOneHotExpertAreNormalCases) {
  MoeConfig c = full_config();
  c.K = 1;
  Weights<float> w = random_weights(c, 30, true);
  w.bias.assign(8, 0.0f);
  w.bias[5] = 100.0f;  // every token on expert 5, all others empty
  const Batch batch = random_batch(c, {24}, 31);
  check_every_split(c, w, batch);
  const Result r = run_layer(c, w, batch);
  EXPECT_EQ(r.counts, (std::vector<std::int64_t>{0, 0, 0, 0, 0, 24, 0, 0}));
}

TEST(MoeLayout, RowsOfOnlyMinusOneGiveTheSharedExpertAlone) {
  MoeConfig c = small_config();
  const Weights<float> w = random_weights(c, 40);
  Batch batch = random_batch(c, {3, 3}, 41);
  batch.replay = {0, 1, -1, -1, 2, -1, -1, 3, -1, -1, 1, 2};
  const Result r = run_layer(c, w, batch);
  for (const std::size_t t : {1u, 4u}) {
    for (std::size_t h = 0; h < 6; ++h) {
      EXPECT_EQ(r.out[t * 6 + h], 0.0f);
      EXPECT_EQ(r.dx[t * 6 + h], 0.0f);
    }
  }
  EXPECT_EQ(r.counts, (std::vector<std::int64_t>{1, 2, 2, 1}));
  EXPECT_EQ(r.slots[0] + r.slots[1], 6);
}

TEST(MoeLayout, NoTokensAnywhereIsANoOp) {
  const MoeConfig c = full_config();
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{0}, std::vector<std::int64_t>{0, 0, 0, 0}}) {
    const Result r = run_layer(c, random_weights(c, 50, true), random_batch(c, tokens, 51));
    EXPECT_EQ(r.valid_tokens, 0.0);
    EXPECT_EQ(r.losses.aux, 0.0);
    EXPECT_EQ(r.losses.z, 0.0);
    Weights<float> gradients = r.gradients;
    gradients.for_each([](const char* name, std::vector<float>& v) {
      for (const float value : v) EXPECT_EQ(value, 0.0f) << name;
    });
  }
}

TEST(MoeLayout, RepeatedRunsAndThreadPoolsGiveTheSameBits) {
  const MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 60, true);
  const Batch batch = random_batch(c, {9, 7, 0, 8}, 61);
  const Result first = run_layer(c, w, batch);
  for (const int threads : {1, 2, 3}) {
    RunOptions options;
    options.pool_threads = threads;
    SCOPED_TRACE(threads);
    expect_bit_equal(run_layer(c, w, batch, options), first);
  }
}

TEST(MoeLayout, AlignedReceiveLayoutsGiveTheSameBits) {
  MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 70, true);
  const Batch batch = random_batch(c, {9, 15}, 71);
  const Result tight = run_layer(c, w, batch);
  for (const std::int64_t alignment : {2, 16, 128}) {
    c.alignment = alignment;
    SCOPED_TRACE(alignment);
    const Result aligned = run_layer(c, w, batch);
    expect_same_layer(aligned, tight, 1e-6);
    EXPECT_EQ(aligned.slots, tight.slots);  // padding is never counted
    EXPECT_DOUBLE_EQ(aligned.flops, tight.flops);
  }
}

TEST(MoeLayout, IdentityExpertsWithUnitWeightsReturnKTimesX) {
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    MoeConfig c = small_config(4, 4, 4, 4);
    c.activation.kind = Activation::kReluSquared;  // relu(x)^2 of stamps 0 and 1 is the stamp itself
    c.combine_wire = wire;
    c.router.scaling_factor = 4.0f;  // equal weights 1/4 become 1
    Weights<float> w = random_weights(c, 80);
    std::fill(w.gate.begin(), w.gate.end(), 0.0f);
    for (std::size_t i = 0; i < w.w1.size(); ++i) w.w1[i] = w.w2[i] = i % 16 % 5 == 0 ? 1.0f : 0.0f;
    Batch batch = random_batch(c, {5, 0, 2, 6}, 81);
    for (std::size_t i = 0; i < batch.x.size(); ++i) batch.x[i] = i % 3 == 0 ? 1.0f : 0.0f;
    const Result r = run_layer(c, w, batch);
    for (std::size_t i = 0; i < batch.x.size(); ++i) EXPECT_EQ(r.out[i], 4.0f * batch.x[i]) << i;
  }
}

// ETP: E = 8, P = 2, t = 2 must equal t = 1, and so must t = 4 on 4 ranks and 2 x 2 on 4.
TEST(MoeLayout, ExpertTensorParallelSlicesSumToTheWholeExpert) {
  MoeConfig c = full_config();
  c.F = 8;
  const Weights<float> w = random_weights(c, 90, true);
  const Batch batch = random_batch(c, {24}, 91);
  const Result whole = run_layer(c, w, batch);
  struct Case {
    int t;
    std::vector<std::int64_t> tokens;
  };
  for (const Case& test : {Case{2, {10, 14}}, Case{4, {24, 0, 0, 0}}, Case{2, {5, 6, 0, 13}}}) {
    SCOPED_TRACE(fmt::format("t {} P {}", test.t, test.tokens.size()));
    MoeConfig etp = c;
    etp.expert_tensor_parallel = test.t;
    Batch split = batch;
    split.tokens = test.tokens;
    const Result r = run_layer(etp, w, split);
    expect_same_layer(r, whole, 3e-6);
    EXPECT_DOUBLE_EQ(r.flops, whole.flops);
    EXPECT_EQ(std::accumulate(r.slots.begin(), r.slots.end(), std::int64_t{0}), test.t * whole.slots[0]);
  }
}

TEST(MoeLayout, GradientsAreAddedToWhatIsThere) {
  const MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 95, true);
  const Batch batch = random_batch(c, {7}, 96);
  const Result once = run_layer(c, w, batch);
  run_ranks(1, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 1, 0, w, batch);
    rank.run(layer, c, batch, {});
    rank.run(layer, c, batch, {});  // the same gradients again
    Weights<float> twice = once.gradients;
    std::vector<std::vector<float>> doubled;
    twice.for_each([&](const char*, std::vector<float>& v) {
      for (float& value : v) value *= 2.0f;
      doubled.push_back(v);
    });
    std::size_t i = 0;
    rank.gradients.w.for_each([&](const char* name, std::vector<float>& v) { EXPECT_LE(relative_error(v, doubled[i++]), 1e-6) << name; });
    EXPECT_TRUE(same_bits(rank.dx, once.dx));  // dx is written
  });
}

TEST(MoeLayout, ForcedBalanceGivesTheSameRoutesAtAnyLayout) {
  MoeConfig c = small_config(8, 2);
  c.router.forced_balance = ForcedBalance::kRoundRobin;
  const Weights<float> w = random_weights(c, 97);
  Batch batch = random_batch(c, {24}, 98);
  const Result one = run_layer(c, w, batch);
  EXPECT_EQ(one.counts, std::vector<std::int64_t>(8, 6));
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{7, 17}, std::vector<std::int64_t>{1, 0, 20, 3}}) {
    batch.tokens = tokens;
    expect_same_layer(run_layer(c, w, batch), one, 3e-6);
  }
}

TEST(MoeCounters, FlopsAndSavedBytesAreThoseOfTheFormula) {
  MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 99, true);
  const Batch batch = random_batch(c, {7}, 98);
  const std::int64_t T = 7, S = 7 * 3, R = 7, W = c.latent, inner = 2 * c.F;
  std::vector<std::size_t> saved;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
    c.recompute = recompute;
    const Result r = run_layer(c, w, batch);
    EXPECT_DOUBLE_EQ(r.flops, 3.0 * 2.0 * static_cast<double>(S * (W * inner + c.F * W)));  // one forward, two matmuls each backward
    saved.push_back(r.saved_bytes);
  }
  EXPECT_EQ(saved[0] - saved[1], static_cast<std::size_t>(4 * (S * c.F + T * c.shared_F)));
  EXPECT_EQ(saved[1] - saved[2], static_cast<std::size_t>(4 * (T * c.E + R * W + S * inner + T * 2 * c.shared_F)));
}

TEST(MoeCounters, EveryPhaseOfTheLayerIsTimed) {
  const MoeConfig c = full_config();
  const Weights<float> w = random_weights(c, 99, true);
  const Batch batch = random_batch(c, {12, 12}, 98);
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 2, fabric.rank(), w, batch);
    PhaseTimes times;
    MoeStep step;
    const MoeTensors parameters = views(c, layer.L(), rank.weights.w);
    const TensorView x = TensorView::of(rank.x.data(), {rank.T, c.H}), out = TensorView::of(rank.out.data(), {rank.T, c.H});
    const auto start = std::chrono::steady_clock::now();
    layer.forward(parameters, x, out, step, {}, &times);
    layer.backward(parameters, views(c, layer.L(), rank.gradients.w), x, out, TensorView::of(rank.dx.data(), {rank.T, c.H}), step, 1.0f, &times);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double sum = 0;
    for (const Phase phase :
         {Phase::kGate, Phase::kRouter, Phase::kPlan, Phase::kDispatch, Phase::kExpertGemm, Phase::kActivation, Phase::kCombine, Phase::kShared}) {
      EXPECT_GT(times.seconds[static_cast<std::size_t>(phase)], 0.0) << to_string(phase);
      sum += times.seconds[static_cast<std::size_t>(phase)];
    }
    EXPECT_LE(sum, wall);  // no phase is counted twice
  });
}

// A row of NaN: it costs that row only, and its counters move in training, not in evaluation.
TEST(MoeCounters, ANonFiniteRowIsCountedOncePerTrainingForward) {
  MoeConfig c = small_config();
  const Weights<float> w = random_weights(c, 60);
  Batch batch = random_batch(c, {6}, 61);
  const Result clean = run_layer(c, w, batch);
  for (std::size_t h = 0; h < 6; ++h) batch.x[12 + h] = std::nanf("");
  run_ranks(1, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 1, 0, w, batch);
    RunOptions options;
    options.backward = false;
    options.forward.training = false;
    rank.run(layer, c, batch, options);
    EXPECT_EQ(rank.step.status.num_nonfinite_rows, 1);
    EXPECT_EQ(layer.status().num_nonfinite_rows, 0);
    options.forward.training = true;
    for (int forward = 1; forward <= 2; ++forward) {
      rank.run(layer, c, batch, options);
      EXPECT_EQ(rank.step.status.num_nonfinite_rows, 1);
      EXPECT_EQ(layer.status().num_nonfinite_rows, forward);
      EXPECT_EQ(layer.status().num_short_rows, forward);
    }
    for (std::size_t i = 0; i < rank.out.size(); ++i) EXPECT_EQ(rank.out[i], i / 6 == 2 ? 0.0f : clean.out[i]) << i;
  });
}

// The router of the forward has counted its rows; what the backward computes again counts nothing.
TEST(MoeCounters, ARecomputedRowIsNotCountedAgain) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
    SCOPED_TRACE(static_cast<int>(recompute));
    MoeConfig c = small_config();
    c.recompute = recompute;
    const Weights<float> w = random_weights(c, 62);
    Batch batch = random_batch(c, {6}, 63);
    for (std::size_t h = 0; h < 6; ++h) batch.x[12 + h] = std::nanf("");
    run_ranks(1, [&](Fabric& fabric) {
      MoeLayer layer(c, fabric, fabric);
      RankRun rank(c, 1, 0, w, batch);
      for (int step = 1; step <= 2; ++step) {
        rank.run(layer, c, batch, {});  // forward and backward
        EXPECT_EQ(layer.status().num_nonfinite_rows, step);
        EXPECT_EQ(layer.status().num_short_rows, step);
      }
    });
  }
}

}  // namespace
}  // namespace waybill::test
