// SPDX-License-Identifier: Apache-2.0
// Every older design gives the layer's result, forward and backward; what it costs is counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "baselines/stack_runner.h"

namespace waybill::test {
namespace {

constexpr MoeStackKind kBaselines[] = {MoeStackKind::kLoop, MoeStackKind::kPadded, MoeStackKind::kCapacity, MoeStackKind::kDenseMap,
                                       MoeStackKind::kBlockSparse};

std::vector<std::int32_t> skewed_ids(std::int64_t T, std::int64_t K, std::int64_t E, std::int64_t first) {
  std::vector<std::int32_t> ids;  // expert 0 in every row, the others in turn; experts E/2 .. get nothing
  for (std::int64_t t = 0; t < T; ++t) {
    ids.push_back(t % 5 == 4 ? -1 : 0);
    for (std::int64_t k = 1; k < K; ++k) ids.push_back(static_cast<std::int32_t>(1 + (t * (K - 1) + k + first) % (E / 2 - 1)));
  }
  return ids;
}

TEST(MoeStacks, EveryBaselineEqualsTheLayerAtAnyNumberOfRanks) {
  for (const Activation activation : {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared}) {
    MoeConfig c = small_config(8, 3, 10, 7);
    c.activation.kind = activation;
    c.router.score = activation == Activation::kSwiGLU ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax;
    const Weights<float> w = random_weights(c, 900);
    for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{16}, {9, 7}, {7, 0, 5, 4}}) {
      const Batch batch = random_batch(c, tokens, 901);
      const StackResult wanted = run_stack(stack_config(MoeStackKind::kSparse, c), w, batch);
      EXPECT_EQ(wanted.counters.real_rows, batch.T() * c.K);
      for (const MoeStackKind kind : kBaselines) {
        SCOPED_TRACE(std::string(to_string(kind)) + ", P = " + std::to_string(tokens.size()) + ", activation " + std::to_string(static_cast<int>(activation)));
        const StackResult seen = run_stack(stack_config(kind, c), w, batch, /*threads=*/2);
        expect_equal(seen, wanted);
        EXPECT_EQ(seen.counters.dropped_routes, 0);
        EXPECT_EQ(seen.counters.real_rows, batch.T() * c.K);
        EXPECT_GE(seen.counters.computed_rows, seen.counters.real_rows);
      }
    }
  }
}

TEST(MoeStacks, SkewedReplayedRoutesWithMissingSlotsAndIdleExperts) {
  MoeConfig c = small_config(8, 2, 6, 5);
  const Weights<float> w = random_weights(c, 910, /*router_bias=*/true);
  Batch batch = random_batch(c, {11, 6}, 911);
  batch.replay = skewed_ids(17, 2, 8, 3);
  const StackResult wanted = run_stack(stack_config(MoeStackKind::kSparse, c), w, batch);
  const std::int64_t routes = std::count_if(batch.replay.begin(), batch.replay.end(), [](std::int32_t id) { return id >= 0; });
  for (const MoeStackKind kind : kBaselines) {
    SCOPED_TRACE(to_string(kind));
    const StackResult seen = run_stack(stack_config(kind, c), w, batch);
    expect_equal(seen, wanted);
    EXPECT_EQ(seen.counters.real_rows, routes);
    EXPECT_EQ(seen.counters.scores_visited, 0);
  }
  batch.replay[1] = batch.replay[0];
  EXPECT_THROW(run_stack(stack_config(MoeStackKind::kLoop, c), w, batch), Error);
}

TEST(MoeStacks, ResultsAreBitEqualOnRepeatAndForAnyNumberOfThreads) {
  const MoeConfig c = small_config(8, 3, 70, 9);
  const Weights<float> w = random_weights(c, 920);
  const Batch batch = random_batch(c, {40, 33}, 921);
  for (int kind = 0; kind < kNumMoeStacks; ++kind) {
    SCOPED_TRACE(kind);
    const MoeStackConfig config = stack_config(static_cast<MoeStackKind>(kind), c);
    const StackResult once = run_stack(config, w, batch, 1), again = run_stack(config, w, batch, 3, /*repeats=*/2);
    EXPECT_TRUE(same_bits(once.out, again.out));
    EXPECT_TRUE(same_bits(once.dx, again.dx));
    EXPECT_TRUE(same_bits(once.gradients, again.gradients));
    EXPECT_EQ(once.counters.slots_visited, again.counters.slots_visited);  // the counters were reset in between
    EXPECT_EQ(once.counters.bytes.total(), again.counters.bytes.total());
  }
}

// The ladder of the ablation: all 16 combinations give the same result, and each change lowers its own metric.
TEST(DenseMapStack, EveryCombinationOfChangesGivesTheSameResult) {
  MoeConfig c = small_config(16, 3, 6, 4);
  c.router.score = ScoreFunction::kSigmoid;
  const Weights<float> w = random_weights(c, 930);
  const Batch batch = random_batch(c, {9, 0, 6, 8}, 931);
  const StackResult wanted = run_stack(stack_config(MoeStackKind::kSparse, c), w, batch);
  for (int bits = 0; bits < 16; ++bits) {
    SCOPED_TRACE(bits);
    MoeStackConfig config = stack_config(MoeStackKind::kDenseMap, c);
    config.changes = {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
    expect_equal(run_stack(config, w, batch), wanted);
  }
}

TEST(DenseMapStack, EachChangeLowersItsOwnMetric) {
  const MoeConfig c = small_config(16, 3, 6, 4);
  const Weights<float> w = random_weights(c, 940);
  const Batch batch = random_batch(c, {32, 32}, 941);
  MoeStackConfig config = stack_config(MoeStackKind::kDenseMap, c);
  const auto step = [&] { return run_stack(config, w, batch).counters; };
  const MoeStackCounters dense = step();
  config.changes.compact_routes = true;
  const MoeStackCounters compact = step();
  config.changes.local_slice = true;
  const MoeStackCounters slice = step();
  config.changes.row_lists = true;
  const MoeStackCounters lists = step();
  config.changes.fast_top_k = true;
  const MoeStackCounters fast = step();
  // Two ranks, each sends its route to one peer: 32 tokens * 16 experts bytes, or 32 * 3 ids of 2 bytes.
  EXPECT_EQ(dense.bytes.ids, 2 * 32 * 16);
  EXPECT_EQ(compact.bytes.ids, 2 * 32 * 3 * 2);
  // Rows carry 16 or 8 probabilities, there and back.
  EXPECT_EQ(compact.bytes.weights, dense.bytes.weights);
  EXPECT_EQ(slice.bytes.weights * 2, compact.bytes.weights);
  EXPECT_EQ(dense.bytes.weights, dense.bytes.rows * 16 * 4 * 2);
  EXPECT_LT(lists.slots_visited, slice.slots_visited);
  EXPECT_EQ(lists.bytes.total(), slice.bytes.total());
  EXPECT_EQ(dense.scores_visited, 64 * 16 * (1 + 3));
  EXPECT_EQ(fast.scores_visited, 64 * 16);
  EXPECT_EQ(fast.slots_visited, lists.slots_visited);
  for (const MoeStackCounters* counters : {&dense, &compact, &slice, &lists, &fast}) {
    EXPECT_EQ(counters->bytes.payload, dense.bytes.payload);
    EXPECT_EQ(counters->bytes.combined, counters->bytes.payload);  // every row comes back, forward and backward
  }
  // Lists, exactly: own routes (T K), everyone's routes on each rank, then one pass over S for numbering, probabilities, two permutations,
  // two sums and the returned gradients, and K routes of every sent row for the probabilities and their gradients.
  const std::vector<std::int32_t> ids = run_stack(config, w, batch).ids;
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < 64; ++t) {
    const auto first = ids.begin() + static_cast<std::ptrdiff_t>(3 * t);
    for (const bool upper : {false, true}) rows += std::any_of(first, first + 3, [&](std::int32_t id) { return (id >= 8) == upper; }) ? 1 : 0;
  }
  EXPECT_EQ(fast.slots_visited, 64 * 3 + 2 * 64 * 3 + 7 * 64 * 3 + 2 * 3 * rows);
}

// What a token lost is counted, and a token that lost nothing is the same as without drops.
TEST(CapacityStack, KeptTokensAreEqualAndDropsAreCounted) {
  const MoeConfig c = small_config(4, 2, 6, 3);
  const Weights<float> w = random_weights(c, 950);
  const Batch batch = random_batch(c, {24, 16}, 951);
  const StackResult wanted = run_stack(stack_config(MoeStackKind::kSparse, c), w, batch);
  for (const DropOrder order : {DropOrder::kPosition, DropOrder::kProbability}) {
    for (const bool pad : {false, true}) {
      SCOPED_TRACE(std::string(order == DropOrder::kPosition ? "position" : "probability") + (pad ? ", padded" : ""));
      MoeStackConfig config = stack_config(MoeStackKind::kCapacity, c);
      config.capacity_factor = 0.75;
      config.drop_order = order;
      config.pad_to_capacity = pad;
      const StackResult seen = run_stack(config, w, batch);
      EXPECT_EQ(seen.ids, wanted.ids);
      std::int64_t dropped = 0, whole = 0;
      for (std::size_t t = 0; t < 40; ++t) {
        std::int64_t lost = 0;
        for (std::size_t k = 0; k < 2; ++k) {
          const bool is_kept = seen.kept[2 * t + k] == seen.ids[2 * t + k];
          EXPECT_TRUE(is_kept || seen.kept[2 * t + k] == -1);
          lost += is_kept ? 0 : 1;
        }
        dropped += lost;
        whole += lost == 0 ? 1 : 0;
        for (std::size_t h = 0; lost == 0 && h < 6; ++h) {
          EXPECT_NEAR(seen.out[6 * t + h], wanted.out[6 * t + h], 2e-5);
          EXPECT_NEAR(seen.dx[6 * t + h], wanted.dx[6 * t + h], 2e-5);
        }
        for (std::size_t h = 0; lost == 2 && h < 6; ++h) EXPECT_EQ(seen.out[6 * t + h], 0.0f);
      }
      EXPECT_GT(dropped, 0);
      EXPECT_GT(whole, 0);
      EXPECT_EQ(seen.counters.dropped_routes, dropped);
      EXPECT_EQ(seen.counters.real_rows, 40 * 2 - dropped);
      // ceil(0.75 * 24 * 2 / 4) = 9 and ceil(0.75 * 16 * 2 / 4) = 6 rows for each of 4 experts, whatever the routes.
      EXPECT_EQ(seen.counters.computed_rows, pad ? 4 * (9 + 6) : 40 * 2 - dropped);
    }
  }
}

// Position keeps early tokens, probability keeps large weights. One expert, room for 2 of 4.
TEST(CapacityStack, TheTwoDropRulesKeepWhatTheySay) {
  MoeConfig c = small_config(2, 1, 2, 1);
  c.router.renormalise = false;
  Weights<float> w = random_weights(c, 960);
  w.gate = {1, 0, -1, 0};  // logit of expert 0 = x0
  Batch batch = random_batch(c, {4}, 961);
  batch.x = {1, 0, 3, 0, 2, 0, 4, 0};
  MoeStackConfig config = stack_config(MoeStackKind::kCapacity, c);
  config.capacity_factor = 1.0;  // ceil(4 / 2) = 2
  config.drop_order = DropOrder::kPosition;
  EXPECT_EQ(run_stack(config, w, batch).kept, (std::vector<std::int32_t>{0, 0, -1, -1}));
  config.drop_order = DropOrder::kProbability;
  EXPECT_EQ(run_stack(config, w, batch).kept, (std::vector<std::int32_t>{-1, 0, -1, 0}));
}

TEST(PaddedStack, ComputesTheFullestExpertForAll) {
  const MoeConfig c = small_config(4, 1, 4, 2);
  const Weights<float> w = random_weights(c, 970);
  Batch batch = random_batch(c, {8, 4}, 971);
  batch.replay = {0, 0, 0, 0, 0, 1, 2, 3, 0, 2, 2, 2};  // rank 0: experts 0, 1 with 6 and 1 rows; rank 1: 4 and 1
  EXPECT_EQ(run_stack(stack_config(MoeStackKind::kPadded, c), w, batch).counters.computed_rows, 2 * 6 + 2 * 4);
  EXPECT_EQ(run_stack(stack_config(MoeStackKind::kLoop, c), w, batch).counters.computed_rows, 12);
  // Blocks of 4 rows: 8 + 4 and 4 + 4.
  EXPECT_EQ(run_stack(stack_config(MoeStackKind::kBlockSparse, c), w, batch).counters.computed_rows, 8 + 4 + 4 + 4);
}

TEST(MoeStacks, BytesOfTheSlotExchangeAreTheFormula) {
  const MoeConfig c = small_config(4, 2, 6, 2);
  const Weights<float> w = random_weights(c, 980);
  Batch batch = random_batch(c, {3, 1}, 981);
  batch.replay = {0, 1, 2, 0, 3, 2, 1, 0};  // rank 0 sends 3 of 6 slots to rank 1, rank 1 both of its slots to rank 0
  const MoeStackCounters loop = run_stack(stack_config(MoeStackKind::kLoop, c), w, batch).counters;
  EXPECT_EQ(loop.bytes.rows, 5);
  EXPECT_EQ(loop.bytes.payload, 2 * 5 * 6 * 4);
  EXPECT_EQ(loop.bytes.combined, 2 * 5 * 6 * 4);
  EXPECT_EQ(loop.bytes.counts, 2 * 2 * 8);
  const MoeStackCounters sparse = run_stack(stack_config(MoeStackKind::kSparse, c), w, batch).counters;
  EXPECT_EQ(sparse.bytes.rows, 3);
  EXPECT_EQ(sparse.bytes.payload, 2 * 3 * 6 * 4);  // once per rank: tokens 1 and 2 of rank 0, the token of rank 1
}

TEST(MoeStacks, ARecipeIsRefusedByName) {
  MoeStackConfig config;
  config.moe.H = config.moe.F = 32, config.moe.E = 4, config.moe.K = 2;
  config.moe.recipe.kind = Recipe::kMXFP8;
  try {
    validate(config, 2);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "a baseline multiplies fp32 operands: recipe = mxfp8");
  }
}

TEST(MoeStacks, WhatAStackCannotDoIsRefusedWithTheValues) {
  const auto message = [](const MoeStackConfig& config) -> std::string {
    try {
      validate(config, 2);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  MoeStackConfig config = stack_config(MoeStackKind::kLoop, small_config());
  EXPECT_EQ(message(config), "accepted");
  config.moe.shared_F = 3;
  EXPECT_THAT(message(config), testing::HasSubstr("shared_F = 3"));
  config = stack_config(MoeStackKind::kCapacity, small_config());
  config.capacity_factor = -1;
  EXPECT_THAT(message(config), testing::HasSubstr("capacity_factor = -1"));
  config = stack_config(MoeStackKind::kBlockSparse, small_config());
  config.block = 0;
  EXPECT_THAT(message(config), testing::HasSubstr("block = 0"));
  config = stack_config(MoeStackKind::kLoop, small_config(3, 1));
  EXPECT_THAT(message(config), testing::HasSubstr("E = 3 is not divisible"));
  EXPECT_EQ(parse_moe_stack("dense-map"), MoeStackKind::kDenseMap);
  EXPECT_THROW(parse_moe_stack("dense"), Error);
}

}  // namespace
}  // namespace waybill::test
