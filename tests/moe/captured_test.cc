// SPDX-License-Identifier: Apache-2.0
// Captured mode on the CPU: fixed budgets, replays with new routes, overflow that is seen by all and recovered from (F26).
#include <gtest/gtest.h>

#include "moe/harness.h"

namespace waybill::test {
namespace {

constexpr std::int64_t kT = 64;

MoeConfig captured_config(double receive_factor) {
  MoeConfig c = small_config(8, 4, 6, 3);
  c.mode = ExchangeMode::kCaptured;
  c.T_max = kT;
  c.receive_factor = receive_factor;
  c.aux_coefficient = 0.1f;
  return c;
}

enum Pattern { kBalanced, kSkewed, kEmptySource, kOneRank, kNone };

// Two ranks of 64 tokens (0 and 128 for the empty source are not legal: T_max is 64, so rank 0 is empty and rank 1 full).
Batch pattern_batch(const MoeConfig& c, Pattern pattern, std::uint64_t seed) {
  Batch batch = random_batch(c, {pattern == kEmptySource ? 0 : kT, kT}, seed);
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    for (std::int64_t k = 0; k < 4; ++k) {
      switch (pattern) {
        case kSkewed:
          batch.replay.push_back(static_cast<std::int32_t>(k < 3 ? k : 4 + t % 4));
          break;
        case kOneRank:
          batch.replay.push_back(static_cast<std::int32_t>(k));
          break;  // expert 0 in every row, the rest on its rank
        case kNone:
          batch.replay.push_back(-1);
          break;
        default:
          batch.replay.push_back(static_cast<std::int32_t>((t + 2 * k) % 8));
      }
    }
  }
  return batch;
}

TEST(MoeFieldCases, F26_EveryReplayIsBitEqualToAnEagerRun) {
  const MoeConfig captured = captured_config(2.0);
  MoeConfig eager = captured;
  eager.mode = ExchangeMode::kEager, eager.receive_factor = 0, eager.T_max = 0;
  const Weights<float> w = random_weights(captured, 260);
  std::vector<Batch> batches{pattern_batch(captured, kBalanced, 261)};
  for (int replay = 0; replay < 12; ++replay)
    batches.push_back(pattern_batch(captured, static_cast<Pattern>(replay % 5), 262 + static_cast<std::uint64_t>(replay)));
  std::vector<Result> expected;
  for (const Batch& batch : batches) expected.push_back(run_layer(eager, w, batch));
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(captured, fabric, fabric);
    MoeStep step;  // one step, reused: what a graph would do
    for (std::size_t i = 0; i < batches.size(); ++i) {
      SCOPED_TRACE(fmt::format("replay {} rank {}", i, fabric.rank()));
      RankRun rank(captured, 2, fabric.rank(), w, batches[i]);
      rank.step = std::move(step);
      rank.run(layer, captured, batches[i], {});
      EXPECT_TRUE(rank.step.valid);
      EXPECT_TRUE(starts_with_bits(expected[i].out.data() + rank.first * captured.H, rank.out));
      EXPECT_TRUE(starts_with_bits(expected[i].dx.data() + rank.first * captured.H, rank.dx));
      Result part = empty_result(captured, 2, w, batches[i]);
      rank.collect(captured, 2, fabric.rank(), layer, part);
      const std::int64_t n1 = static_cast<std::int64_t>(part.gradients.w1.size()) / 2, at = fabric.rank() * n1;
      EXPECT_EQ(0, std::memcmp(part.gradients.w1.data() + at, expected[i].gradients.w1.data() + at, static_cast<std::size_t>(n1) * 4));
      EXPECT_EQ(rank.step.slots, expected[i].slots[static_cast<std::size_t>(fabric.rank())]);
      if (i > 0 && i % 5 == 0) {
        EXPECT_EQ(rank.step.slots + rank.step.rows, 0);  // every route is -1
      }
      step = std::move(rank.step);
    }
  });
}

TEST(MoeFieldCases, F26_OverflowIsDeclaredOnEveryRankAndTheNextReplayIsRight) {
  const MoeConfig c = captured_config(1.171875);
  const Weights<float> w = random_weights(c, 270);
  const Batch balanced = pattern_batch(c, kBalanced, 271), worst = pattern_batch(c, kOneRank, 272);
  const Result expected = run_layer(c, w, balanced);
  EXPECT_EQ(expected.slots, (std::vector<std::int64_t>{256, 256}));
  MoeConfig eager = c;
  eager.mode = ExchangeMode::kEager, eager.receive_factor = 0;
  const Result expected_worst = run_layer(eager, w, worst);
  EXPECT_EQ(expected_worst.slots[0], 512);
  EXPECT_EQ(expected_worst.rows[0], 128);

  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    EXPECT_EQ(layer.budget().slots, 300);
    EXPECT_EQ(layer.budget().rows, 128);
    RankRun bad(c, 2, fabric.rank(), w, worst);
    const auto poison = [](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 3.0f); };
    bad.gradients.w.for_each(poison);
    bad.run(layer, c, worst, {});
    EXPECT_FALSE(bad.step.valid);
    for (const float value : bad.out) EXPECT_EQ(value, 0.0f);
    for (const float value : bad.dx) EXPECT_EQ(value, 0.0f);
    bad.gradients.w.for_each([](const char* name, std::vector<float>& v) {
      for (const float value : v) ASSERT_EQ(value, 3.0f) << name;
    });
    const StatusWord& status = layer.status();
    if (fabric.rank() == 0) {
      EXPECT_EQ(status.flags & kStatusSlotOverflow, kStatusSlotOverflow);
      EXPECT_EQ(status.slot_demand, 512);
      EXPECT_EQ(status.slot_capacity, 300);
      EXPECT_EQ(status.row_demand, 128);
      EXPECT_EQ(status.row_capacity, 128);
      EXPECT_EQ(bad.step.status.slot_demand, 512);
      EXPECT_EQ(status.flags & kStatusRowOverflow, 0u);
    }
    layer.status().clear();

    RankRun good(c, 2, fabric.rank(), w, balanced);
    good.run(layer, c, balanced, {});
    EXPECT_TRUE(good.step.valid);
    EXPECT_FALSE(layer.status().overflowed());
    EXPECT_TRUE(starts_with_bits(expected.out.data() + good.first * c.H, good.out));

    layer.set_receive_factor(2.0);  // rerun of the batch that did not fit, larger
    EXPECT_EQ(layer.budget().slots, 512);
    RankRun again(c, 2, fabric.rank(), w, worst);
    again.run(layer, c, worst, {});
    EXPECT_TRUE(again.step.valid);
    EXPECT_TRUE(starts_with_bits(expected_worst.out.data() + again.first * c.H, again.out));
    EXPECT_TRUE(starts_with_bits(expected_worst.dx.data() + again.first * c.H, again.dx));
  });
}

TEST(MoeFieldCases, F26_AnOverflowDuringEvaluationIsNotSilent) {
  const MoeConfig c = captured_config(1.171875);
  const Weights<float> w = random_weights(c, 280);
  const Batch worst = pattern_batch(c, kOneRank, 281);
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 2, fabric.rank(), w, worst);
    RunOptions options;
    options.backward = false;
    options.forward.training = false;
    rank.run(layer, c, worst, options);
    EXPECT_FALSE(rank.step.valid);
    EXPECT_EQ(layer.status().overflowed(), fabric.rank() == 0);
  });
}

TEST(MoeFieldCases, F26_CaptureWithoutAStaticSizeIsRefusedInWords) {
  MoeConfig c = captured_config(1.5);
  c.T_max = 0;
  try {
    run_ranks(2, [&](Fabric& fabric) { MoeLayer layer(c, fabric, fabric); });
    FAIL() << "captured mode without T_max was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("captured mode has fixed sizes: it needs T_max"), std::string::npos) << error.what();
  }
}

TEST(MoeCaptured, EagerModeTakesMoreThanTMaxTokensAndAnyFactor) {
  MoeConfig c = small_config();
  const Weights<float> w = random_weights(c, 285);
  const Batch batch = random_batch(c, {5, 2}, 286);
  const Result expected = run_layer(c, w, batch);
  c.T_max = 3, c.receive_factor = 0.1;
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    layer.set_receive_factor(0.2);
    RankRun rank(c, 2, fabric.rank(), w, batch);
    rank.run(layer, c, batch, {});
    EXPECT_TRUE(rank.step.valid);
    EXPECT_TRUE(starts_with_bits(expected.out.data() + rank.first * c.H, rank.out));
  });
}

TEST(MoeCaptured, TheDefaultReceiveFactorIsOneAndAHalf) {
  const MoeConfig c = captured_config(0);
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    EXPECT_EQ(layer.receive_factor(), 1.5);
    EXPECT_EQ(layer.budget().slots, 384);
    layer.set_receive_factor(3.0);
    EXPECT_EQ(layer.receive_factor(), 3.0);
    layer.set_receive_factor(0);  // worst case: 2 ranks of 64 tokens, at most 4 local experts each
    EXPECT_EQ(layer.budget().slots, 512);
  });
}

// The router makes scratch of a few rows at every call, so a batch is compared with its repeat: whatever came between, not one
// allocation more.
TEST(MoeCaptured, ReplaysAllocateNothingMoreOnceTheBudgetsAreBooked) {
  MoeConfig c = captured_config(2.0);
  c.latent = 4, c.shared_F = 2, c.expert_bias = true;
  const std::pair<Recompute, Recipe> cases[] = {{Recompute::kNone, Recipe::kF32},
                                                {Recompute::kActivation, Recipe::kF32},
                                                {Recompute::kLayer, Recipe::kF32},
                                                {Recompute::kNone, Recipe::kBF16},
                                                {Recompute::kLayer, Recipe::kFP8}};
  for (const auto& [recompute, recipe] : cases) {
    SCOPED_TRACE(to_string(recipe));
    c.recompute = recompute;
    c.recipe.kind = recipe;
    const Weights<float> w = random_weights(c, 290);
    const std::vector<Batch> batches{pattern_batch(c, kOneRank, 292), pattern_batch(c, kEmptySource, 293), pattern_batch(c, kNone, 291),
                                     pattern_batch(c, kOneRank, 294), pattern_batch(c, kOneRank, 295)};
    run_ranks(2, [&](Fabric& fabric) {
      MoeLayer layer(c, fabric, fabric);
      MoeStep step;
      std::vector<std::size_t> allocations;
      for (const Batch& batch : batches) {
        RankRun rank(c, 2, fabric.rank(), w, batch);
        rank.step = std::move(step);
        if (rank.step.route.T() != rank.T) rank.step.route = Route(rank.T, c.K, c.E);
        fabric.barrier("begin");
        const AllocationTrace trace;  // of both ranks
        fabric.barrier("run");
        rank.run(layer, c, batch, {});
        fabric.barrier("done");
        allocations.push_back(trace.count());
        fabric.barrier("read");
        step = std::move(rank.step);
      }
      EXPECT_GT(allocations[0], allocations[3]) << "the first step books its buffers";
      EXPECT_EQ(allocations[3], allocations[4]) << "recompute " << static_cast<int>(c.recompute);
    });
  }
}

}  // namespace
}  // namespace waybill::test
