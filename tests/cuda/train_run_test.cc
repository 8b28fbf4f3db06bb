// SPDX-License-Identifier: Apache-2.0
// Whole runs on the GPU against runs on the CPU. Operands of matmuls are bf16 on one side and fp32 on the other: the bound is 1% of the loss a step, and
// what the device's counters say must add up exactly.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "cuda/needs_gpu.h"
#include "train/cuda/device_trainer.h"
#include "train/run_helper.h"

namespace waybill::test {
namespace {

using Overrides = std::vector<std::string>;

struct Outcome {
  std::unique_ptr<Recording> owner = std::make_unique<Recording>();
  Recording& recording = *owner;
  TrainResult result;
};

class TrainCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::has_gpu()) GTEST_SKIP() << "needs a GPU";
    cuda::register_training();
  }
  // A run of configs/<config>.toml in folder `name`.
  Outcome run(const std::string& config, const std::string& name, const std::string& device, Overrides overrides, bool resume = false) {
    overrides.insert(overrides.end(), {"train.device=" + device, "train.measure_ceiling=false", "exchange.debug_checks=false"});
    Outcome outcome;
    TrainOptions options;
    options.run_dir = folder_.run(name);
    options.resume = resume;
    outcome.result = waybill::train(folder_.config(overrides, config), options, &outcome.recording);
    return outcome;
  }
  static void expect_close(const Recording& gpu, const Recording& cpu, double bound) {
    ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
    for (std::size_t i = 0; i < cpu.losses.size(); ++i) EXPECT_NEAR(gpu.losses[i], cpu.losses[i], bound * cpu.losses[i]) << "step " << i + 1;
  }
  RunFolder folder_{60000};
};

const Overrides kShort = {"train.steps=20",        "train.warmup_steps=5", "train.eval_every=10", "train.eval_sequences=16", "train.final_eval_sequences=32",
                          "train.sample_tokens=4", "train.global_batch=16"};

TEST_F(TrainCuda, AShortRunOfTheDemoFollowsTheCpusLossesAndItsCountersAddUp) {
  const Outcome cpu = run("demo", "cpu", "cpu", kShort), gpu = run("demo", "gpu", "cuda", kShort);
  expect_close(gpu.recording, cpu.recording, 0.01);
  EXPECT_NEAR(gpu.result.held_out_loss, cpu.result.held_out_loss, 0.01 * cpu.result.held_out_loss);
  EXPECT_LT(gpu.recording.losses.back(), gpu.recording.losses.front() - 0.5);
  EXPECT_NE(gpu.recording.headers.at(0).device, "cpu");
  for (std::size_t i = 0; i < gpu.recording.steps.size(); ++i) {
    const StepMetrics &m = gpu.recording.steps[i], &c = cpu.recording.steps[i];
    EXPECT_TRUE(m.valid);
    EXPECT_EQ(m.tokens, c.tokens);
    if (m.step <= 3) {  // later ones differ at the spikes of a high rate
      EXPECT_NEAR(m.grad_norm, c.grad_norm, 0.1 * c.grad_norm) << m.step;
    }
    EXPECT_NEAR(m.aux_loss, c.aux_loss, 0.02 * c.aux_loss) << m.step;
    ASSERT_EQ(m.layers.size(), c.layers.size());
    for (const LayerMetrics& layer : m.layers) {
      std::int64_t routes = 0, slots = 0, rows = 0;
      for (const std::int64_t count : layer.counts) routes += count;
      for (const std::int64_t count : layer.rank_slots) slots += count;
      for (const std::int64_t count : layer.rank_rows) rows += count;
      EXPECT_EQ(routes, 2 * m.tokens) << m.step;
      EXPECT_EQ(slots, routes) << m.step;
      EXPECT_LE(rows, slots) << m.step;
      EXPECT_GE(rows, m.tokens) << m.step;
    }
  }
}

TEST_F(TrainCuda, AnExceededBudgetIsComputedAgainAtTheDemandSeen) {
  Overrides tight = kShort;
  tight.insert(tight.end(), {"exchange.mode=captured", "exchange.receive_factor=0.6"});
  const Outcome free = run("demo", "free", "cuda", kShort), again = run("demo", "again", "cuda", tight);
  EXPECT_GT(again.result.reruns, 0);
  EXPECT_EQ(again.result.skipped, 0);
  EXPECT_EQ(again.recording.losses, free.recording.losses);  // the same bits: the budget shows in no result
}

TEST_F(TrainCuda, AnExceededBudgetSkipsUpdatesUntilItIsRead) {
  Overrides late = kShort;
  late.insert(late.end(), {"exchange.mode=captured", "exchange.receive_factor=0.6", "train.overflow_check_every=4", "train.max_skipped=0"});
  const Outcome run_late = run("demo", "late", "cuda", late);
  EXPECT_EQ(run_late.recording.steps.size(), 20u);
  EXPECT_EQ(run_late.result.reruns, 0);
  EXPECT_GE(run_late.result.skipped, 4);  // the first four steps are queued before anything is read
  EXPECT_LT(run_late.result.skipped, 20);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(run_late.recording.steps[i].overflowed) << i;
    EXPECT_GT(run_late.recording.steps[i].layers[0].slot_demand, 0) << i;
  }
}

TEST_F(TrainCuda, ReadingStepsLateChangesNoLoss) {
  Overrides late = kShort;
  late.push_back("train.overflow_check_every=7");
  EXPECT_EQ(run("demo", "late", "cuda", late).recording.losses, run("demo", "each", "cuda", kShort).recording.losses);
}

// configs/golden.toml has every mechanism on: shared expert, groups, z-loss, two micro-batches.
TEST_F(TrainCuda, ARunMovesFromTheGpuToTheCpuAndBack) {
  const Outcome cpu = run("golden", "cpu", "cpu", {});
  const Outcome start = run("golden", "moving", "cuda", {"train.steps=10"});
  const Outcome middle = run("golden", "moving", "cpu", {"train.steps=20"}, /*resume=*/true);
  const Outcome end = run("golden", "moving", "cuda", {}, /*resume=*/true);
  Recording all;
  for (const Outcome* part : {&start, &middle, &end}) all.losses.insert(all.losses.end(), part->recording.losses.begin(), part->recording.losses.end());
  ASSERT_EQ(all.losses.size(), cpu.recording.losses.size());
  // The schedule's length differs between the parts, so only the first part is compared step by step.
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(all.losses[i], cpu.recording.losses[i], 0.01 * cpu.recording.losses[i]) << i;
  EXPECT_NEAR(all.losses.back(), cpu.recording.losses.back(), 0.05 * cpu.recording.losses.back());
}

}  // namespace
}  // namespace waybill::test
