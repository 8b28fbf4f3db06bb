// SPDX-License-Identifier: Apache-2.0
// Field cases on the MoE layer of GPUs.
#include <optional>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

using Choose = std::function<std::vector<std::int32_t>(std::int64_t t)>;

TEST(MoeCudaCases, F26_ReplaysWithNewRoutesEqualEagerAndAnOverflowIsReported) {
  WB_NEEDS_GPU();
  MoeConfig c = gpu_config(8, 4, 64);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1.171875;
  const auto id = [](std::int64_t e) { return static_cast<std::int32_t>(e % 8); };
  const Choose balanced = [&](std::int64_t t) { return std::vector{id(t), id(t + 1), id(t + 2), id(t + 3)}; };
  const Choose skewed = [&](std::int64_t t) { return std::vector{0, 1 + id(t % 3), 4 + id(t % 4), 4 + id((t + 1) % 4)}; };
  const Choose one_source = [&](std::int64_t t) { return t < 64 ? std::vector{-1, -1, -1, -1} : balanced(t); };
  const Choose one_rank = [](std::int64_t) { return std::vector{0, 1, 2, 3}; };
  const Choose nothing = [](std::int64_t) { return std::vector{-1, -1, -1, -1}; };
  const mt::Weights<float> w = bf16_weights(c, 26);
  GpuMoe eager(c, 2, w, {}), captured(c, 2, w, {});
  EXPECT_EQ(captured.layer().budget().slots, 300);
  EXPECT_EQ(captured.layer().budget().rows, 128);
  const Choose order[] = {balanced, skewed, one_source, one_rank, nothing, balanced};
  for (std::uint64_t replay = 0; replay < 12; ++replay) {
    const Choose& choose = order[replay % 6];
    mt::Batch batch = bf16_batch(c, {64, 64}, 2 * replay);
    for (std::int64_t t = 0; t < 128; ++t) {
      const std::vector<std::int32_t> ids = choose(t);
      batch.replay.insert(batch.replay.end(), ids.begin(), ids.end());
    }
    eager.upload(batch), eager.step();
    captured.upload(batch);
    if (replay == 0) captured.step(), captured.capture(), captured.upload(batch);
    captured.replay();
    const bool overflows = replay % 6 == 3;
    expect_same_bits(eager.result(), captured.result(), fmt::format("replay {}", replay));
    const DeviceMoeReport report = captured.report(0);
    EXPECT_EQ(report.valid, overflows ? 0 : 1) << replay;
    EXPECT_EQ(report.slots, overflows || replay % 6 == 4 ? 0 : (replay % 6 == 2 ? 128 : 256)) << replay;
    if (replay % 6 == 4) {
      EXPECT_EQ(report.rows, 0);
    }
    const StatusWord status = captured.status(0);
    EXPECT_EQ(status.overflowed(), overflows) << replay;
    if (!overflows) continue;
    EXPECT_EQ(status.slot_demand, 512);
    EXPECT_EQ(status.slot_capacity, 300);
    EXPECT_EQ(status.row_demand, 128);
    EXPECT_EQ(status.row_capacity, 128);
    eager.clear_status(), captured.clear_status();
  }
}

mt::Batch replayed(const MoeConfig& c, const std::vector<std::int64_t>& tokens, std::uint64_t seed, const Choose& choose) {
  mt::Batch batch = bf16_batch(c, tokens, seed);
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    const std::vector<std::int32_t> ids = choose(t);
    batch.replay.insert(batch.replay.end(), ids.begin(), ids.end());
  }
  return batch;
}

TEST(MoeCudaCases, F11_RecomputeAndEvaluationCountNothingTwice) {
  WB_NEEDS_GPU();
  for (const int P : {1, 2}) {
    MoeConfig c = gpu_config(8, 2, 64);
    c.aux_coefficient = 1;
    mt::Weights<float> w = bf16_weights(c, 11);
    std::fill(w.gate.begin(), w.gate.end(), 0.0f);  // uniform scores
    const mt::Batch batch = replayed(c, even(P, 64 / P), 3, [](std::int64_t t) {
      return std::vector{static_cast<std::int32_t>(2 * t % 8), static_cast<std::int32_t>((2 * t + 1) % 8)};
    });
    std::optional<mt::Result> first;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
      for (const int evaluations : {0, 2}) {
        c.recompute = recompute;
        GpuMoe gpu(c, P, w, {});
        gpu.upload(batch), gpu.zero_gradients();
        for (int i = 0; i < evaluations; ++i) gpu.evaluate();
        gpu.step();
        const mt::Result got = gpu.result();
        EXPECT_NEAR(got.losses.aux, 1.0, 1e-6) << P;
        for (int p = 0; p < P; ++p) EXPECT_EQ(gpu.total_counts(p), std::vector<std::int32_t>(8, 16)) << P;
        if (first) expect_same_bits(*first, got, fmt::format("P {}, recompute {}, {} evaluations", P, static_cast<int>(recompute), evaluations));
        if (!first) first = got;
      }
    }
  }
}

TEST(MoeCudaCases, F16_FortyStepsHaveTheSameBits) {
  WB_NEEDS_GPU();
  for (const int P : {1, 2}) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      MoeConfig c = gpu_config(16, 8, 512, 512, 64);
      c.combine_wire = wire;
      GpuMoe gpu(c, P, bf16_weights(c, 16), {});
      const mt::Batch batch = bf16_batch(c, even(P, 512 / P), 16);
      gpu.upload(batch), gpu.step();
      const mt::Result first = gpu.result();
      for (int run = 1; run < 40; ++run) {
        gpu.step();
        expect_same_bits(first, gpu.result(), fmt::format("P {}, run {}", P, run));
        if (HasFailure()) return;
      }
    }
  }
}

TEST(MoeCudaCases, F17_ARankWithoutTokensWhicheverItIs) {
  WB_NEEDS_GPU();
  const auto first_six = [](std::int64_t) { return std::vector{0, 1, 2, 3, 4, 5}; };
  const MoeConfig c = gpu_config(24, 6, 4);
  const mt::Weights<float> w = bf16_weights(c, 17);
  GpuMoe gpu(c, 4, w, {});
  for (int step = 0; step < 10; ++step) {
    std::vector<std::int64_t> tokens(4, 4);
    tokens[static_cast<std::size_t>(step % 4)] = 0;
    const mt::Batch batch = replayed(c, tokens, static_cast<std::uint64_t>(step), first_six);
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    ASSERT_EQ(gpu.first_error(), "") << step;
    mt::Result got = gpu.result();
    EXPECT_EQ(got.slots, (std::vector<std::int64_t>{72, 0, 0, 0})) << step;
    EXPECT_EQ(got.rows, (std::vector<std::int64_t>{12, 0, 0, 0})) << step;
    EXPECT_EQ(gpu.report(0).min_expert_rows, 12) << step;
    EXPECT_EQ(gpu.report(0).max_expert_rows, 12) << step;
    expect_agreement(c, w, batch, got, fmt::format("step {}", step));
  }
  const mt::Batch nothing = replayed(c, {0, 0, 0, 0}, 1, first_six);
  gpu.upload(nothing), gpu.zero_gradients(), gpu.step();
  mt::Result got = gpu.result();
  EXPECT_EQ(got.slots, (std::vector<std::int64_t>{0, 0, 0, 0}));
  got.gradients.for_each(
      [](const char* name, const std::vector<float>& v) { EXPECT_TRUE(std::all_of(v.begin(), v.end(), [](float x) { return x == 0; })) << name; });
  GpuMoe two(c, 2, w, {});
  two.upload(replayed(c, {0, 4}, 2, first_six)), two.step();
  EXPECT_EQ(two.report(0).slots, 24);
  EXPECT_EQ(two.report(0).rows, 4);
}

TEST(MoeCudaCases, F20_AnExpertWithoutTokensHasNoGradient) {
  WB_NEEDS_GPU();
  for (const int P : {1, 2, 4}) {
    for (const bool accumulate : {false, true}) {
      const MoeConfig c = gpu_config(8, 2, 64);
      MoeGpuOptions options;
      options.accumulate = accumulate;
      GpuMoe gpu(c, P, bf16_weights(c, 20), options);
      gpu.zero_gradients();
      gpu.upload(bf16_batch(c, even(P, 64 / P), 20)), gpu.step();  // every expert has some
      mt::Result before = gpu.result();
      gpu.upload(replayed(c, even(P, 64 / P), 21, [](std::int64_t) { return std::vector{0, 2}; })), gpu.step();
      mt::Result after = gpu.result();
      const auto expect_untouched = [&](const std::vector<float>& was, const std::vector<float>& is, const char* name) {
        const std::size_t each = is.size() / 8;
        for (std::size_t e = 0; e < 8; ++e) {
          const auto begin = is.begin() + static_cast<std::ptrdiff_t>(e * each), end = begin + static_cast<std::ptrdiff_t>(each);
          const bool same = std::equal(begin, end, was.begin() + static_cast<std::ptrdiff_t>(e * each));
          const bool zero = std::all_of(begin, end, [](float x) { return x == 0; });
          const bool routed = e == 0 || e == 2;
          EXPECT_EQ(accumulate ? same : zero, !routed) << name << " of expert " << e << ", P " << P << ", accumulate " << accumulate;
        }
      };
      expect_untouched(before.gradients.w1, after.gradients.w1, "w1");
      expect_untouched(before.gradients.w2, after.gradients.w2, "w2");
    }
  }
}

// Weights of about 0.7 and 0.3: logits ln(7 / 3) apart. Matrices are 0, so that a token's output is (0.7 + 0.3) b; experts are padded to 32 rows.
TEST(MoeCudaCases, F22_ABiasIsWeightedByTheRouterAndNotPutOnPadding) {
  WB_NEEDS_GPU();
  for (const int P : {1, 2}) {
    MoeConfig c = gpu_config(2, 2, 10);
    c.expert_bias = true, c.alignment = 32;
    c.router.score = ScoreFunction::kSoftmax;
    mt::Weights<float> w = bf16_weights(c, 22);
    std::fill(w.w1.begin(), w.w1.end(), 0.0f), std::fill(w.w2.begin(), w.w2.end(), 0.0f), std::fill(w.b1.begin(), w.b1.end(), 0.0f);
    for (std::int64_t h = 0; h < c.H; ++h) {
      w.gate[static_cast<std::size_t>(h)] = h == 0 ? 0.84375f : 0.0f, w.gate[static_cast<std::size_t>(c.H + h)] = 0.0f;
      w.b2[static_cast<std::size_t>(h)] = w.b2[static_cast<std::size_t>(c.H + h)] = 0.25f + static_cast<float>(h);
    }
    mt::Batch batch = bf16_batch(c, even(P, 10 / P), 22);
    std::fill(batch.x.begin(), batch.x.end(), 1.0f), std::fill(batch.d_out.begin(), batch.d_out.end(), 1.0f);
    GpuMoe gpu(c, P, w, {});
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    ASSERT_EQ(gpu.first_error(), "");
    const mt::Result got = gpu.result();
    const double larger = 1 / (1 + std::exp(-0.84375));
    EXPECT_NEAR(larger, 0.7, 1e-3);
    for (std::int64_t t = 0; t < 10; ++t) {
      for (std::int64_t h = 0; h < c.H; ++h) {
        const double b = 0.25 + static_cast<double>(h);
        EXPECT_NEAR(got.out[static_cast<std::size_t>(t * c.H + h)], b, 0x1p-7 * b) << "P " << P << ", token " << t;
      }
    }
    for (std::int64_t h = 0; h < c.H; ++h) {
      EXPECT_NEAR(got.gradients.b2[static_cast<std::size_t>(h)], 10 * larger, 1e-4) << "P " << P;
      EXPECT_NEAR(got.gradients.b2[static_cast<std::size_t>(c.H + h)], 10 * (1 - larger), 1e-4) << "P " << P;
    }
  }
}

}  // namespace
}  // namespace waybill::cuda
