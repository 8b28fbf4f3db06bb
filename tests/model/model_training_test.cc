// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "model_test_util.h"

namespace waybill {
namespace {

using namespace testing;

// A corpus with structure: a fixed successor of every token, now and then a jump.
Tensor structured_tokens(const ModelConfig& c, std::int64_t first_sequence, std::int64_t B) {
  Tensor tokens(DType::kI32, {B, c.seq_len + 1});
  for (std::int64_t b = 0; b < B; ++b) {
    const auto sequence = static_cast<std::uint64_t>(first_sequence + b);
    auto token = static_cast<std::int64_t>(random_u64(1, sequence) % static_cast<std::uint64_t>(c.vocab));
    for (std::int64_t i = 0; i <= c.seq_len; ++i) {
      tokens.as<std::int32_t>()[b * (c.seq_len + 1) + i] = static_cast<std::int32_t>(token);
      token = random_uniform(2, sequence * 1000 + static_cast<std::uint64_t>(i)) < 0.1f ? (token + 7) % c.vocab : (token * 5 + 3) % c.vocab;
    }
  }
  return tokens;
}

ModelConfig trainable_model(int P) {
  LayerConfig moe = moe_layer(8, 2, 16, P);
  moe.moe.aux_coefficient = 0.01f;
  ModelConfig c = tiny_model({dense_layer(24), moe});
  c.init_std = 0.05f;
  c.qk_norm = true;
  return c;
}

TEST(ModelTraining, LossFallsFarOnAStructuredCorpus) {
  std::vector<double> first(4), last(4), held_out(4);
  run_ranks(4, [&](Fabric& world) {
    LanguageModel model(trainable_model(4), world, 9);
    std::vector<OptimizerState> states = make_optimizer_states(model.parameters());
    const auto rank = static_cast<std::size_t>(world.rank());
    OptimizerConfig config;
    config.weight_decay = 0.01f;
    for (std::int64_t step = 1; step <= 120; ++step) {
      const Tensor tokens = structured_tokens(model.config(), step * 16 + world.rank() * 4, 4);
      const TensorView batch = tokens.view();
      const StepStats stats = model.forward_backward(std::span(&batch, 1));
      (step == 1 ? first : last)[rank] = stats.loss;
      adamw_step(config, 1e-2f, static_cast<float>(clip_scale(model.gradient_norm(), 1.0)), step, model.parameters(), states);
    }
    held_out[rank] = model.evaluate(structured_tokens(model.config(), 100000 + world.rank() * 4, 4));
  });
  // The source's entropy is H(0.9, 0.1) = 0.325 nat.
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_NEAR(first[r], std::log(23.0), 0.3);
    EXPECT_LT(held_out[r], 0.8);
    EXPECT_LT(last[r], 0.8);
    EXPECT_EQ(held_out[r], held_out[0]);
  }
}

TEST(ModelTraining, EvaluationAndLogitsChangeNoState) {
  std::vector<Snapshot> values(2), gradients(2);
  std::vector<StepStats> stats(2);
  std::mutex mutex;
  for (const bool evaluate_before : {false, true}) {
    run_ranks(2, [&](Fabric& world) {
      ModelConfig c = trainable_model(2);
      c.layers[1].moe.bias_update_rate = 1e-3f;
      LanguageModel model(c, world, 9);
      const Tensor tokens = structured_tokens(c, world.rank() * 2, 2);
      const TensorView batch = tokens.view();
      if (evaluate_before) {
        model.evaluate(batch);
        model.evaluate(batch);
        Tensor out(DType::kF32, {3, c.vocab});
        const std::int32_t prompt[] = {1, 2, 3};
        model.logits(prompt, out);
      }
      const StepStats s = model.forward_backward(std::span(&batch, 1));
      model.update_router_bias(s);
      collect(model, true, gradients[evaluate_before], mutex);
      collect(model, false, values[evaluate_before], mutex);
      if (world.rank() == 0) stats[evaluate_before] = s;
    });
  }
  expect_same_bits(gradients[1], gradients[0]);
  expect_same_bits(values[1], values[0]);
  EXPECT_EQ(stats[0].loss, stats[1].loss);
  EXPECT_EQ(stats[0].layers[0].counts, stats[1].layers[0].counts);
  EXPECT_EQ(stats[0].bytes.payload, stats[1].bytes.payload);
  EXPECT_EQ(stats[0].expert_flops, stats[1].expert_flops);
}

TEST(ModelTraining, LogitsGiveTheLossThatEvaluationReports) {
  for (const int P : {1, 2}) {
    run_ranks(P, [&](Fabric& world) {
      const ModelConfig c = trainable_model(P);
      LanguageModel model(c, world, 9);
      const Tensor tokens = structured_tokens(c, 3, 1);  // the same sequence on every rank
      const auto* t = tokens.as<std::int32_t>();
      Tensor out(DType::kF32, {c.seq_len, c.vocab});
      model.logits(std::span(t, static_cast<std::size_t>(c.seq_len)), out);
      double loss = 0;
      for (std::int64_t i = 0; i < c.seq_len; ++i) {
        double total = 0;
        for (std::int64_t v = 0; v < c.vocab; ++v) total += std::exp(static_cast<double>(out.as<float>()[i * c.vocab + v]));
        loss += std::log(total) - out.as<float>()[i * c.vocab + t[i + 1]];
      }
      EXPECT_NEAR(model.evaluate(tokens), loss / static_cast<double>(c.seq_len), 1e-5);
      // A shorter prompt gives the same first rows: the model is causal.
      Tensor part(DType::kF32, {3, c.vocab});
      model.logits(std::span(t, 3), part);
      for (std::int64_t i = 0; i < 3 * c.vocab; ++i) ASSERT_NEAR(part.as<float>()[i], out.as<float>()[i], 1e-5);
    });
  }
}

TEST(ModelTraining, PoolDoesNotChangeTheBits) {
  ThreadPool pool(3);
  Snapshot serial, pooled;
  std::mutex mutex;
  const ModelConfig c = trainable_model(1);
  const Tensor tokens = structured_tokens(c, 0, 5);
  const TensorView batch = tokens.view();
  const std::unique_ptr<Fabric> world = make_single_fabric();
  LanguageModel a(c, *world, 9), b(c, *world, 9, &pool);
  const double loss_a = a.forward_backward(std::span(&batch, 1)).loss, loss_b = b.forward_backward(std::span(&batch, 1)).loss;
  collect(a, true, serial, mutex);
  collect(b, true, pooled, mutex);
  EXPECT_EQ(loss_a, loss_b);
  expect_same_bits(pooled, serial);
}

TEST(ModelTraining, AnOverflowMakesTheStepInvalidAndALargerBudgetCuresIt) {
  std::vector<int> invalid(4), cured(4);
  run_ranks(4, [&](Fabric& world) {
    ModelConfig c = trainable_model(2);
    c.max_sequences = 2;
    c.layers[1].moe.mode = ExchangeMode::kCaptured;
    c.layers[1].moe.receive_factor = 0.05;
    LanguageModel model(c, world, 9);
    const Tensor tokens = structured_tokens(c, world.rank() * 2, 2);
    const TensorView batch = tokens.view();
    const auto rank = static_cast<std::size_t>(world.rank());
    const StepStats bad = model.forward_backward(std::span(&batch, 1));
    invalid[rank] = !bad.valid && bad.status.overflowed() ? 1 : 0;
    EXPECT_THROW(model.evaluate(batch), Error);
    model.set_receive_factor(2.0);
    const StepStats good = model.forward_backward(std::span(&batch, 1));
    cured[rank] = good.valid && std::isfinite(model.gradient_norm()) ? 1 : 0;
  });
  EXPECT_GE(std::count(invalid.begin(), invalid.end(), 1), 1);
  EXPECT_EQ(std::count(cured.begin(), cured.end(), 1), 4);
}

}  // namespace
}  // namespace waybill
