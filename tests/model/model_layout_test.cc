// SPDX-License-Identifier: Apache-2.0
// The same global batch gives the same loss and gradients however it is spread over ranks and micro-batches.
#include <gmock/gmock.h>

#include "model/batch.h"
#include "model_test_util.h"

namespace waybill {
namespace {

using namespace testing;

struct Outcome {
  StepStats stats;
  double norm = 0, loss = 0;
  Snapshot gradients, values;
};

// Sequences are dealt out so that the order of the global batch is: micro-batches one after another, ranks in order within.
// `uneven`: rank 0 takes one sequence more than the others, in a batch of 2 W + 1 sequences per micro-batch.
Outcome run(const ModelConfig& config, int W, int micro_batches, std::int64_t sequences, int sgd_steps = 0, bool uneven = false) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(W, [&](Fabric& world) {
    LanguageModel model(config, world, 5);
    const std::int64_t per_micro_batch = sequences / micro_batches;
    std::vector<Tensor> tokens;
    std::vector<TensorView> views;
    for (int m = 0; m < micro_batches; ++m) {
      const std::int64_t share = per_micro_batch / W, extra = uneven && world.rank() == 0 ? per_micro_batch % W : 0;
      const std::int64_t skipped = uneven && world.rank() > 0 ? per_micro_batch % W : 0;
      tokens.push_back(random_tokens(config, m * per_micro_batch + world.rank() * share + skipped, share + extra));
      views.push_back(tokens.back().view());
    }
    StepStats stats;
    double norm = 0;
    for (int step = 0; step <= sgd_steps; ++step) {
      stats = model.forward_backward(views);
      norm = model.gradient_norm();
      model.update_router_bias(stats);
      if (step < sgd_steps) sgd_step(0.5f, 1.0f, model.parameters());
    }
    collect(model, true, outcome.gradients, mutex);
    collect(model, false, outcome.values, mutex);
    const std::lock_guard<std::mutex> lock(mutex);
    if (outcome.norm != 0) {
      EXPECT_EQ(outcome.norm, norm) << "the norm differs between ranks";
      EXPECT_EQ(outcome.loss, stats.loss);
    }
    outcome.norm = norm;
    outcome.loss = stats.loss;
    if (world.rank() == 0) outcome.stats = stats;
  });
  return outcome;
}

// Every loss on, router bias on: whatever may depend on the layout.
ModelConfig full_model(int P) {
  LayerConfig a = moe_layer(8, 2, 10, P), b = moe_layer(4, 2, 6, P);
  a.moe.aux_coefficient = 0.3f;
  a.moe.global_coefficient = 0.1f;
  a.moe.z_coefficient = 0.01f;
  a.moe.shared_F = 6;
  b.moe.sequence_coefficient = 0.2f;
  b.moe.router.score = ScoreFunction::kSigmoid;
  b.moe.bias_update_rate = 1e-3f;
  b.moe.expert_bias = true;
  return tiny_model({dense_layer(12), a, b});
}

constexpr double kBound = 2e-5;  // of a parameter's largest gradient: fp32 sums in another order

void expect_equal_outcome(const Outcome& got, const Outcome& expected) {
  EXPECT_NEAR(got.stats.loss, expected.stats.loss, 1e-6 * expected.stats.loss);
  EXPECT_NEAR(got.stats.aux_loss, expected.stats.aux_loss, 1e-6 * expected.stats.aux_loss);
  EXPECT_NEAR(got.norm, expected.norm, 1e-5 * expected.norm);
  EXPECT_EQ(got.stats.tokens, expected.stats.tokens);
  expect_close(got.gradients, expected.gradients, kBound);
  ASSERT_EQ(got.stats.layers.size(), expected.stats.layers.size());
  for (std::size_t i = 0; i < got.stats.layers.size(); ++i) EXPECT_EQ(got.stats.layers[i].counts, expected.stats.layers[i].counts) << "layer " << i;
}

TEST(ModelLayout, FirstWeightsDoNotDependOnThePlacement) {
  const Outcome one = run(full_model(1), 1, 1, 8);
  for (const int P : {1, 2, 4}) expect_same_bits(run(full_model(P), 4, 1, 8).values, one.values);
}

TEST(ModelLayout, LossAndGradientsAgreeAtEveryPlacementOfFourRanks) {
  const Outcome one = run(full_model(1), 1, 1, 8);
  EXPECT_GT(one.stats.aux_loss, 0.0);
  for (const int P : {1, 2, 4}) {
    SCOPED_TRACE(fmt::format("(P, D) = ({}, {})", P, 4 / P));
    expect_equal_outcome(run(full_model(P), 4, 1, 8), one);
  }
}

TEST(ModelLayout, LossAndGradientsAgreeForOneAndFourMicroBatches) {
  // The Switch loss pairs each micro-batch's counts with its own scores, the global loss adds those of earlier ones: their values
  // depend on the cut. Without them the sum over micro-batches is exact.
  ModelConfig c = full_model(1);
  c.layers[1].moe.aux_coefficient = c.layers[1].moe.global_coefficient = 0;
  const Outcome one = run(c, 1, 1, 8);
  expect_equal_outcome(run(c, 1, 4, 8), one);
  for (LayerConfig& layer : c.layers)
    if (layer.is_moe) layer.P = 2;
  expect_equal_outcome(run(c, 2, 4, 8), one);
}

TEST(ModelLayout, F09_AuxStrengthIsTheSameForEqualMicroBatches) {
  // Twice the batch as 2 equal micro-batches: the same sequences twice. Shares of experts are equal, so the global loss is too.
  ModelConfig c = full_model(1);
  const std::unique_ptr<Fabric> world = make_single_fabric();
  LanguageModel model(c, *world, 5);
  const Tensor tokens = random_tokens(c, 0, 4);
  const TensorView twice[] = {tokens.view(), tokens.view()};
  std::mutex mutex;
  Snapshot once_gradients, twice_gradients;
  const StepStats once = model.forward_backward(std::span(twice, 1));
  collect(model, true, once_gradients, mutex);
  const StepStats both = model.forward_backward(twice);
  collect(model, true, twice_gradients, mutex);
  EXPECT_NEAR(both.aux_loss, once.aux_loss, 1e-6 * once.aux_loss);
  EXPECT_NEAR(both.loss, once.loss, 1e-6 * once.loss);
  expect_close(twice_gradients, once_gradients, kBound);
}

TEST(ModelLayout, SgdKeepsFourRanksOnTheCourseOfOne) {
  // SGD hides no wrong gradient scale: doubled expert gradients would show in the second step.
  const Outcome one = run(full_model(1), 1, 1, 8, 3);
  for (const int P : {1, 2, 4}) {
    SCOPED_TRACE(P);
    const Outcome four = run(full_model(P), 4, 1, 8, 3);
    EXPECT_NEAR(four.stats.loss, one.stats.loss, 1e-5 * one.stats.loss);
    expect_close(four.values, one.values, 1e-4);
  }
}

TEST(ModelLayout, RanksMayBringDifferentNumbersOfSequences) {
  const Outcome one = run(full_model(1), 1, 1, 9);
  for (const int P : {1, 2, 4}) {
    SCOPED_TRACE(P);
    expect_equal_outcome(run(full_model(P), 4, 1, 9, 0, true), one);
  }
}

TEST(ModelLayout, ARankWithoutSequencesTakesPart) {
  const Outcome one = run(full_model(1), 1, 1, 3);
  expect_equal_outcome(run(full_model(4), 4, 1, 3, 0, true), one);  // ranks 1 to 3 have none
}

TEST(ModelLayout, LayersMayDifferInExpertsTopKAndRanks) {
  ModelConfig mixed = full_model(1);
  mixed.layers.push_back(moe_layer(10, 3, 8));
  mixed.layers[3].moe.router.forced_balance = ForcedBalance::kRoundRobin;  // by global row: the same at any P
  const Outcome one = run(mixed, 1, 1, 8);
  mixed.layers[1].P = 4;  // 8 experts, top 2
  mixed.layers[2].P = 1;  // 4 experts, all on every rank
  mixed.layers[3].P = 2;  // 10 experts, top 3, two expert-parallel groups
  const Outcome four = run(mixed, 4, 1, 8);
  expect_equal_outcome(four, one);
  EXPECT_EQ(four.stats.layers[0].rank_slots.size(), 4u);
  EXPECT_EQ(four.stats.layers[1].rank_slots.size(), 1u);
  EXPECT_EQ(four.stats.layers[2].rank_slots.size(), 2u);
}

TEST(ModelLayout, RepeatsAreBitEqual) {
  for (const int P : {2, 4}) {
    const Outcome a = run(full_model(P), 4, 2, 8, 2), b = run(full_model(P), 4, 2, 8, 2);
    EXPECT_EQ(a.stats.loss, b.stats.loss);
    EXPECT_EQ(a.norm, b.norm);
    expect_same_bits(a.gradients, b.gradients);
    expect_same_bits(a.values, b.values);
  }
}

TEST(ModelLayout, F11_RecomputeChangesNoBitAndCountsNothingTwice) {
  const Outcome plain = run(full_model(2), 2, 2, 8, 1);
  for (const Recompute recompute : {Recompute::kActivation, Recompute::kLayer}) {
    ModelConfig c = full_model(2);
    for (LayerConfig& layer : c.layers) layer.moe.recompute = recompute;
    const Outcome again = run(c, 2, 2, 8, 1);
    EXPECT_EQ(again.stats.loss, plain.stats.loss);
    EXPECT_EQ(again.stats.aux_loss, plain.stats.aux_loss);
    EXPECT_EQ(again.stats.expert_flops, plain.stats.expert_flops);
    for (std::size_t i = 0; i < plain.stats.layers.size(); ++i) EXPECT_EQ(again.stats.layers[i].counts, plain.stats.layers[i].counts);
    expect_same_bits(again.gradients, plain.gradients);
    expect_same_bits(again.values, plain.values);
  }
}

TEST(ModelLayout, StatisticsCountEveryRouteOnce) {
  const Outcome four = run(full_model(2), 4, 2, 8);
  EXPECT_EQ(four.stats.tokens, 64);
  for (const MoeLayerStats& s : four.stats.layers) {
    std::int64_t routes = 0, slots = 0;
    for (const std::int64_t n : s.counts) routes += n;
    for (const std::int64_t n : s.rank_slots) slots += n;
    EXPECT_EQ(routes, 64 * 2);
    EXPECT_EQ(slots, 64) << "rank 0's group of two ranks has half of the tokens";
    EXPECT_EQ(s.nonfinite_rows, 0);
    EXPECT_EQ(s.short_rows, 0);
  }
  EXPECT_GT(four.stats.bytes.payload, 0);
  // Forward + 2 x backward of 3 matrices, this rank's slots.
  const double expected =
      6.0 * 3 * (static_cast<double>(four.stats.layers[0].rank_slots[0]) * 16 * 10 + static_cast<double>(four.stats.layers[1].rank_slots[0]) * 16 * 6);
  EXPECT_DOUBLE_EQ(four.stats.expert_flops, expected);
}

TEST(ModelLayout, ReplicasStayBitEqualUnderAdamW) {
  // collect() compares all holders of a parameter to the bit.
  Snapshot values;
  std::mutex mutex;
  run_ranks(4, [&](Fabric& world) {
    LanguageModel model(full_model(2), world, 5);
    std::vector<OptimizerState> states = make_optimizer_states(model.parameters());
    const OptimizerConfig config;
    for (std::int64_t step = 1; step <= 6; ++step) {
      const Tensor tokens = random_tokens(model.config(), step * 100 + world.rank() * 2, 2);
      const TensorView batch = tokens.view();
      const StepStats stats = model.forward_backward(std::span(&batch, 1));
      const double norm = model.gradient_norm();
      ASSERT_TRUE(std::isfinite(norm));
      adamw_step(config, 1e-2f, static_cast<float>(clip_scale(norm, 0.5)), step, model.parameters(), states);
      model.update_router_bias(stats);
    }
    collect(model, false, values, mutex);
  });
  EXPECT_TRUE(values.count("layers.2.moe.router_bias"));
  bool moved = false;
  for (const float b : values["layers.2.moe.router_bias"]) moved = moved || b != 0.0f;
  EXPECT_TRUE(moved);
}

TEST(ModelLayout, F27_ModelNormCountsEachExpertOnce) {
  // All gradients set by hand: replicated ones 0 but one element 4 (square 16), expert e of the one MoE layer e + 1.
  for (const int P : {1, 2, 4}) {
    std::vector<double> norms(4);
    run_ranks(4, [&](Fabric& world) {
      LanguageModel model(tiny_model({moe_layer(8, 2, 5, P)}), world, 1);
      model.zero_gradients();
      for (Parameter& p : model.parameters()) {
        if (p.name == "final_norm.weight") p.grad.as<float>()[3] = 4.0f;
        if (p.name != "layers.0.moe.w2") continue;
        const std::int64_t size = p.grad.size() / p.grad.dim(0);
        for (std::int64_t e = 0; e < p.grad.dim(0); ++e)
          if (p.expert_begin + e != 5) p.grad.as<float>()[e * size] = static_cast<float>(p.expert_begin + e + 1);  // expert 5: no tokens, exactly 0
      }
      norms[static_cast<std::size_t>(world.rank())] = model.gradient_norm();
    });
    for (const double norm : norms) EXPECT_EQ(norm, std::sqrt(16.0 + 204.0 - 36.0)) << "P = " << P;
  }
}

TEST(ModelLayout, APositionNeedsItsTokenAndTheNextToBeValid) {
  const ModelConfig c = tiny_model({dense_layer(8)});
  Tensor tokens = random_tokens(c, 0, 2);
  auto* t = tokens.as<std::int32_t>();
  t[4] = -1;      // sequence 0: positions 3 and 4 are invalid
  t[9 + 8] = -1;  // sequence 1: the last position has no target
  const model::TokenBatch batch = model::split_tokens(tokens, c.seq_len);
  const std::vector<std::uint8_t> padding{0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  EXPECT_EQ(batch.padding, padding);
  for (std::size_t i = 0; i < 16; ++i) {
    const std::size_t at = i + i / 8;
    EXPECT_EQ(batch.inputs[i], t[at]);
    EXPECT_EQ(batch.targets[i], padding[i] != 0 ? -1 : t[at + 1]);
  }
  const std::unique_ptr<Fabric> world = make_single_fabric();
  const TensorView view = tokens.view();
  EXPECT_EQ(model::plan_step(std::span(&view, 1), c.seq_len, c.vocab, *world).valid_tokens, 13);
}

TEST(ModelLayout, BadTokensAreRefusedOnEveryRankWithTheSameMessage) {
  const ModelConfig c = tiny_model({dense_layer(8)});
  std::vector<std::string> messages(3);
  run_ranks(3, [&](Fabric& world) {
    LanguageModel model(c, world, 1);
    const auto message_of = [&](std::span<const TensorView> batches) -> std::string {
      try {
        model.forward_backward(batches);
      } catch (const Error& error) {
        return error.what();
      }
      return "accepted";
    };
    Tensor tokens = random_tokens(c, world.rank(), 1);
    if (world.rank() == 1) tokens.as<std::int32_t>()[4] = 23;
    const TensorView batch = tokens.view();
    messages[static_cast<std::size_t>(world.rank())] = message_of(std::span(&batch, 1));
    // Then: ranks with different numbers of micro-batches.
    const Tensor good = random_tokens(c, world.rank(), 1);
    const TensorView two[] = {good.view(), good.view()};
    EXPECT_THAT(message_of(std::span(two, world.rank() == 2 ? 1u : 2u)), ::testing::HasSubstr("rank 2 has 1 micro-batches but rank 0 has 2"));
    // And a wrong width.
    Tensor narrow(DType::kI32, {1, c.seq_len});
    std::fill_n(narrow.as<std::int32_t>(), c.seq_len, 0);
    const TensorView wrong = world.rank() == 0 ? narrow.view() : good.view();
    EXPECT_THAT(message_of(std::span(&wrong, 1)), ::testing::HasSubstr("rank 0: micro-batch 0 must be contiguous i32 [B, 9]"));
  });
  for (const std::string& message : messages) EXPECT_EQ(message, "rank 1: token 23 in micro-batch 0, sequence 0, column 4 is outside [-1, 23)");
}

TEST(ModelLayout, ConfigurationsThatCannotWorkAreRefusedWithTheValues) {
  const auto refuses = [](const ModelConfig& c, int W, const char* text) {
    EXPECT_THAT([&] { validate(c, W); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr(text)));
  };
  refuses(tiny_model({moe_layer(8, 2, 4, 3)}), 4, "P = 3");
  refuses(tiny_model({moe_layer(6, 2, 4, 4)}), 4, "E = 6 is not divisible");
  refuses(tiny_model({moe_layer(4, 5, 4)}), 1, "K = 5");
  refuses(tiny_model({}), 1, "no layers");
  refuses(tiny_model({dense_layer(0)}), 1, "layer 0 is dense and needs dense_F");
  ModelConfig c = tiny_model({dense_layer(4)});
  c.num_kv_heads = 3;
  refuses(c, 1, "num_heads 4 must be a multiple of num_kv_heads 3");
  c = tiny_model({dense_layer(4)});
  c.head_dim = 7;
  refuses(c, 1, "head_dim 7 must be even");
}

}  // namespace
}  // namespace waybill
