// SPDX-License-Identifier: Apache-2.0
// The language model on the GPU against the one on the CPU. Operands are bf16 here and fp32 there, so losses and gradients agree within bounds that follow
// from 2^-9 a rounding; what must be equal to the bit (repeats, checkpoints, skipped steps) is compared as such.
#include "cuda/both_sides.h"
#include "model/cuda/device_memory.h"

namespace waybill::cuda {
namespace {

// A gradient passes about ten roundings of 2^-9 (relative, independent) and sums that cancel: 3%.
TEST(DeviceModel, LossAndEveryGradientAgreeWithTheCpuWithinBf16Bounds) {
  WB_NEEDS_GPU();
  for (const int run : {1, 2, 4, 8, 16}) {
    const int W = run < 8 ? run : run / 4;  // the last two with expert biases and a layer on the dense-map path
    BothSides both(W, 0, /*K=*/8, run >= 8);
    double norm = 0;
    const DeviceStepResult gpu = both.gpu_step(0);
    const StepStats cpu = both.cpu_step(0, &norm);
    EXPECT_EQ(gpu.tokens, cpu.tokens);
    EXPECT_EQ(gpu.update.valid, 1);
    EXPECT_NEAR(gpu.update.loss, cpu.loss, 4e-3 * cpu.loss) << W << " ranks";
    EXPECT_NEAR(gpu.update.norm, norm, 0.02 * norm) << W << " ranks";
    both.gpu->download_gradients();
    for (std::size_t i = 0; i < both.list.parameters.size(); ++i) {
      const Parameter& p = both.list.parameters[i];
      if (!p.trainable) continue;
      EXPECT_LE(relative_l2(p.grad, both.cpu.parameters()[i].grad), 0.03) << p.name << ", " << W << " ranks";
    }
  }
}

// Under a recipe of blocks: the CPU's model takes the same codes but where bf16 moves a value across a rounding boundary, and the same random numbers. Loss and
// norm over three steps and two micro-batches each, whose second one uses the weights' copies of the first.
TEST(DeviceModel, RecipesOfBlocksFollowTheCpu) {
  WB_NEEDS_GPU();
  for (const Recipe recipe : {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4}) {
    for (const int W : {1, 2}) {
      BothSides both(W, 0, /*K=*/8, /*more=*/false, recipe);
      for (int step = 0; step < 3; ++step) {
        both.settings.rounding_seed = 1000 + static_cast<std::uint64_t>(step);
        double norm = 0;
        const DeviceStepResult gpu = both.gpu_step(step);
        const StepStats cpu = both.cpu_step(step, &norm);
        const double loss_bound = recipe == Recipe::kNVFP4 ? 0.02 : 0.008, norm_bound = recipe == Recipe::kNVFP4 ? 0.1 : 0.04;
        EXPECT_EQ(gpu.update.valid, 1) << to_string(recipe);
        EXPECT_NEAR(gpu.update.loss, cpu.loss, loss_bound * cpu.loss) << to_string(recipe) << ", " << W << " ranks, step " << step;
        EXPECT_NEAR(gpu.update.norm, norm, norm_bound * norm) << to_string(recipe) << ", " << W << " ranks, step " << step;
      }
    }
  }
}

// A large coefficient, so that the gate's gradient is mostly this loss's: what it counted in the first micro-batch is in the second one's.
TEST(DeviceModel, AGlobalLossCountsTheMicroBatchesBefore) {
  WB_NEEDS_GPU();
  for (const int W : {1, 2, 4}) {
    BothSides both(W, 0, /*K=*/2, /*more=*/false, Recipe::kF32, /*global=*/20.0f);
    for (int step = 0; step < 2; ++step) {  // the second begins to count anew, from parameters that rounding has moved apart
      const DeviceStepResult gpu = both.gpu_step(step);
      const StepStats cpu = both.cpu_step(step);
      for (std::size_t i = 0; i < gpu.layers.size(); ++i) {
        EXPECT_NEAR(gpu.layers[i].global, cpu.layers[i].global, (step == 0 ? 2e-3 : 1e-2) * cpu.layers[i].global)
            << W << " ranks, step " << step << ", layer " << i;
      }
      both.gpu->download_gradients();
      for (std::size_t i = 0; i < both.list.parameters.size(); ++i) {
        const Parameter& p = both.list.parameters[i];
        if (!p.trainable || !p.name.ends_with("moe.gate")) continue;
        EXPECT_LE(relative_l2(p.grad, both.cpu.parameters()[i].grad), step == 0 ? 0.06 : 0.1) << p.name << ", " << W << " ranks, step " << step;
      }
    }
  }
}

TEST(DeviceModel, CountersAddUpAndFewChoicesDifferFromTheCpus) {
  WB_NEEDS_GPU();
  for (const int W : {1, 4}) {
    BothSides both(W);
    const DeviceStepResult gpu = both.gpu_step(0);
    const StepStats cpu = both.cpu_step(0);
    ASSERT_EQ(gpu.layers.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      std::int64_t all = 0, moved = 0;
      for (std::size_t e = 0; e < gpu.layers[i].counts.size(); ++e) {
        all += gpu.layers[i].counts[e], moved += std::abs(gpu.layers[i].counts[e] - cpu.layers[i].counts[e]);
      }
      EXPECT_EQ(all, 2 * cpu.tokens) << "layer " << i;
      EXPECT_LE(moved, cpu.tokens / 50) << "layer " << i;
      std::int64_t slots = 0;
      for (const RankRecord& rank : gpu.layers[i].ranks) slots += rank.slots;
      EXPECT_EQ(slots, all) << "layer " << i;
    }
  }
}

TEST(DeviceModel, ThirtyStepsFollowTheCpusLosses) {
  WB_NEEDS_GPU();
  BothSides both(4);
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    const double cpu = both.cpu_step(step).loss, gpu = both.gpu_step(step).update.loss;
    EXPECT_NEAR(gpu, cpu, 0.02 * cpu) << "step " << step;
    (step == 0 ? first : last) = gpu;
  }
  EXPECT_LT(last, first - 0.5);  // it does learn
}

TEST(DeviceModel, StepsInFlightRepeatsAndAReloadedStateHaveEqualBits) {
  WB_NEEDS_GPU();
  BothSides a(2), b(2);
  for (int step = 0; step < 4; ++step) a.gpu->queue_step(a.batches(step), a.settings);
  std::vector<double> losses;
  while (a.gpu->in_flight() > 0) losses.push_back(a.gpu->finish_step().update.loss);
  for (int step = 0; step < 2; ++step) EXPECT_EQ(b.gpu_step(step).update.loss, losses[static_cast<std::size_t>(step)]) << step;
  b.gpu->download(b.gpu_states);
  BothSides c(2);
  for (std::size_t i = 0; i < b.list.parameters.size(); ++i) {
    const Parameter &from = b.list.parameters[i], &to = c.list.parameters[i];
    const auto copy = [](const Tensor& source, const Tensor& target) {
      std::memcpy(target.as<float>(), source.as<float>(), static_cast<std::size_t>(source.size()) * sizeof(float));
    };
    copy(from.value, to.value);
    if (from.trainable) copy(b.gpu_states[i].m, c.gpu_states[i].m), copy(b.gpu_states[i].v, c.gpu_states[i].v);
  }
  c.gpu->upload(c.gpu_states, 2);
  for (int step = 2; step < 4; ++step) EXPECT_EQ(c.gpu_step(step).update.loss, losses[static_cast<std::size_t>(step)]) << step;
  EXPECT_EQ(a.gpu_values(), c.gpu_values());
}

TEST(DeviceModel, AStepThatOverflowsChangesNothingAndSaysWhatItNeeds) {
  WB_NEEDS_GPU();
  BothSides both(4, 0.5), enough(4);  // half of balanced load cannot hold
  const std::vector<float> before = both.gpu_values();
  const DeviceStepResult skipped = both.gpu_step(0);
  EXPECT_EQ(skipped.update.valid, 0);
  EXPECT_EQ(skipped.update.budgets_held, 0);
  EXPECT_EQ(skipped.update.updates, 0);
  EXPECT_EQ(both.gpu_values(), before);
  EXPECT_TRUE(skipped.layers[0].overflowed);
  EXPECT_GT(skipped.layers[0].max_slot_demand, both.gpu->budget(0).slots);
  both.gpu->set_receive_factor(4);
  const DeviceStepResult again = both.gpu_step(0), expected = enough.gpu_step(0);
  EXPECT_EQ(again.update.valid, 1);
  EXPECT_EQ(again.update.loss, expected.update.loss);
  EXPECT_EQ(both.gpu_values(), enough.gpu_values());
}

TEST(DeviceModel, EvaluationIsTheForwardLossAndChangesNothing) {
  WB_NEEDS_GPU();
  BothSides both(2);
  const std::vector<float> before = both.gpu_values();
  const auto batches = both.batches(3);
  const DeviceLanguageModel::Evaluation evaluation = both.gpu->evaluate(batches[0]);
  const double cpu = both.cpu.evaluate(make_tokens(BothSides::kSequences, 30));
  EXPECT_FALSE(evaluation.overflowed);
  EXPECT_NEAR(evaluation.loss_sum / static_cast<double>(evaluation.tokens), cpu, 4e-3 * cpu);
  EXPECT_EQ(both.gpu_values(), before);
}

// Forms that take less memory: another order of work, the same numbers.
TEST(DeviceModel, AModelThatMustFitLessMemoryHasTheSameBits) {
  WB_NEEDS_GPU();
  BothSides fast(2), small(2, 0, 2, false, Recipe::kF32, 0, /*memory=*/1);  // the smallest form there is
  for (int step = 0; step < 3; ++step) EXPECT_EQ(fast.gpu_step(step).update.loss, small.gpu_step(step).update.loss) << step;
  EXPECT_EQ(fast.gpu_values(), small.gpu_values());
}

TEST(DeviceModelMemory, TheFastestFormThatFitsIsTaken) {
  ModelConfig config = small_model({2, 2}, /*K=*/4);
  config.H = 512;
  for (LayerConfig& layer : config.layers) {
    if (layer.is_moe) layer.moe.H = config.H;
  }
  DeviceModelOptions options;
  options.B = 32;
  const auto total = [&](std::size_t memory) {
    options.memory = memory;
    return static_cast<std::size_t>(device_model_memory(config, 2, options).total());
  };
  const auto form = [&](std::size_t memory) {
    options.memory = memory;
    const MoeForm chosen = choose_moe_form(config, 2, options);
    return std::pair(chosen.resend_rows, chosen.column_blocks);
  };
  const std::size_t fastest = total(0);
  EXPECT_EQ(form(0), std::pair(false, 1));
  EXPECT_EQ(form(fastest + 1), std::pair(false, 1));
  EXPECT_EQ(form(fastest - 1), std::pair(true, 1));
  const std::size_t resent = total(fastest - 1);
  EXPECT_LT(resent, fastest);
  EXPECT_EQ(form(resent - 1), std::pair(true, 2));
  const std::size_t blocks = total(resent - 1);
  EXPECT_LT(blocks, resent);
  EXPECT_EQ(form(1), std::pair(true, 4));
  EXPECT_LT(total(1), blocks);
  // What a layer cannot do is left out for it.
  MoeConfig moe = device_moe_config(config, config.layers[1], options);
  EXPECT_EQ(moe_options(moe, {true, 4}).column_blocks, 4);
  moe.expert_bias = true;
  EXPECT_EQ(moe_options(moe, {true, 4}).column_blocks, 1);
  EXPECT_TRUE(moe_options(moe, {true, 4}).resend_rows);
  moe.expert_bias = false, moe.recipe.kind = Recipe::kFP8;
  EXPECT_EQ(moe_options(moe, {true, 4}).column_blocks, 1);
}

void expect_refused(const ModelConfig& config, int W, const DeviceModelOptions& options, ErrorCode code, const std::string& text) {
  try {
    DeviceLanguageModel::check(config, W, options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(DeviceModel, WhatIsNotThereIsRefusedByName) {
  DeviceModelOptions options;
  options.devices = {0, 1, 2};
  ModelConfig config = small_model({6, 3});
  for (LayerConfig& layer : config.layers) {
    if (layer.is_moe) layer.moe.E = layer.moe.router.E = 12;
  }
  expect_refused(config, 6, options, ErrorCode::kUnsupported, "layer 1: expert-parallel groups of 3 ranks over 3 GPUs of 2 ranks each");
  options.devices = {0, 0};
  expect_refused(small_model({4, 4}), 4, options, ErrorCode::kInvalidArgument, "named twice");
  config = small_model({2, 2});
  config.head_dim = 320;
  options.devices = {0};
  expect_refused(config, 2, options, ErrorCode::kUnsupported, "head_dim = 320");
}

}  // namespace
}  // namespace waybill::cuda
