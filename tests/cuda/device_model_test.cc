// SPDX-License-Identifier: Apache-2.0
// The language model on the GPU against the one on the CPU. Operands are bf16 here and fp32 there, so losses and gradients agree within bounds that follow
// from 2^-9 a rounding; what must be equal to the bit (repeats, checkpoints, skipped steps) is compared as such.
#include <cmath>
#include <random>

#include "cuda/model_harness.h"
#include "model/cuda/device_language_model.h"
#include "model/cuda/device_memory.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"

namespace waybill::cuda {
namespace {

constexpr std::uint64_t kSeed = 11;
constexpr std::int64_t kVocab = 64, kSeqLen = 32;

// All mechanisms but auxiliary losses, whose value depends on the split over ranks. K = E leaves no choice of experts that rounding could change.
// `options`: expert biases, and in the last layer the dense-map path.
ModelConfig small_model(int P, std::int64_t K = 2, bool options = false, Recipe recipe = Recipe::kF32, float global = 0) {
  ModelConfig c;
  c.vocab = kVocab, c.H = 64, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = 16, c.seq_len = kSeqLen, c.qk_norm = true, c.init_std = 0.08f;
  for (int i = 0; i < 3; ++i) {
    LayerConfig& layer = c.layers.emplace_back();
    layer.is_moe = i > 0, layer.dense_F = 96, layer.P = P;
    layer.moe.E = 8, layer.moe.K = K, layer.moe.F = recipe == Recipe::kF32 ? 48 : 64, layer.moe.recipe.kind = recipe, layer.moe.H = c.H,
    layer.moe.bias_update_rate = i == 2 ? 0.01f : 0.0f;
    layer.moe.router.E = 8, layer.moe.router.K = K, layer.moe.router.score = ScoreFunction::kSigmoid, layer.moe.router.renormalise = true;
    layer.moe.global_coefficient = global;
    layer.moe.expert_bias = options, layer.moe.force_dense_map = options && i == 2;
    if (!layer.is_moe) layer.moe = MoeConfig{};
  }
  return c;
}

// Tokens that can be learned: each is followed by one of two. The last sequence ends in padding.
Tensor make_tokens(std::int64_t B, unsigned seed) {
  std::mt19937 random(seed);
  Tensor tokens(DType::kI32, {B, kSeqLen + 1});
  for (std::int64_t b = 0; b < B; ++b) {
    std::uint32_t token = random() % kVocab;
    for (std::int64_t s = 0; s <= kSeqLen; ++s) {
      tokens.as<std::int32_t>()[b * (kSeqLen + 1) + s] = b == B - 1 && s > kSeqLen - 5 ? -1 : static_cast<std::int32_t>(token);
      token = (token * 5 + random() % 2 + 1) % kVocab;
    }
  }
  return tokens;
}

class BothSides {
 public:
  static constexpr std::int64_t kSequences = 8, kMicroBatches = 2;

  explicit BothSides(int W, double receive_factor = 0, std::int64_t K = 2, bool more = false, Recipe recipe = Recipe::kF32, float global = 0,
                     std::size_t memory = 0)
      : W_(W),
        fabric_(make_single_fabric()),
        cpu(small_model(1, K, more, recipe, global), *fabric_, kSeed),
        states(make_optimizer_states(cpu.parameters())),
        list(model::make_parameters(small_model(1, K, more, recipe, global), 0, kSeed, nullptr)),
        gpu_states(make_optimizer_states(list.parameters)) {
    register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
    DeviceModelOptions options;
    options.B = kSequences / W, options.micro_batches = kMicroBatches, options.receive_factor = receive_factor, options.steps_in_flight = 4;
    options.memory = memory;
    gpu = std::make_unique<DeviceLanguageModel>(small_model(W, K, more, recipe, global), W, list, options);
    gpu->upload(gpu_states, 0);
  }

  DeviceLanguageModel::Batches batches(int step) const {
    DeviceLanguageModel::Batches all;
    for (int m = 0; m < kMicroBatches; ++m) {
      const Tensor tokens = make_tokens(kSequences, static_cast<unsigned>(10 * step + m));
      std::vector<model::TokenBatch>& ranks = all.emplace_back();
      const std::int64_t each = kSequences / W_;
      for (int r = 0; r < W_; ++r) ranks.push_back(model::split_tokens(tokens.view().rows(r * each, (r + 1) * each), kSeqLen));
    }
    return all;
  }
  DeviceStepResult gpu_step(int step) {
    gpu->queue_step(batches(step), settings);
    return gpu->finish_step();
  }
  // Loss and norm; then the update.
  StepStats cpu_step(int step, double* norm = nullptr) {
    std::vector<Tensor> tokens;
    std::vector<TensorView> views;
    for (int m = 0; m < kMicroBatches; ++m) tokens.push_back(make_tokens(kSequences, static_cast<unsigned>(10 * step + m)));
    for (const Tensor& t : tokens) views.push_back(t);
    StepStats stats = cpu.forward_backward(views, settings.rounding_seed);
    const double n = cpu.gradient_norm();
    if (norm != nullptr) *norm = n;
    adamw_step(settings.optimizer, settings.learning_rate, static_cast<float>(clip_scale(n, settings.clip_norm)), ++updates_, cpu.parameters(), states);
    cpu.update_router_bias(stats);
    return stats;
  }
  std::vector<float> gpu_values() {
    gpu->download(gpu_states);
    std::vector<float> all;
    for (std::size_t i = 0; i < list.parameters.size(); ++i) {
      const Parameter& p = list.parameters[i];
      all.insert(all.end(), p.value.as<float>(), p.value.as<float>() + p.value.size());
      if (p.trainable) all.insert(all.end(), gpu_states[i].v.as<float>(), gpu_states[i].v.as<float>() + p.value.size());
    }
    return all;
  }

 private:
  int W_;
  std::unique_ptr<Fabric> fabric_;
  std::int64_t updates_ = 0;

 public:
  DeviceUpdate settings{{}, 3e-3f, 1.0};
  LanguageModel cpu;
  std::vector<OptimizerState> states;
  model::ParameterList list;
  std::vector<OptimizerState> gpu_states;
  std::unique_ptr<DeviceLanguageModel> gpu;
};

double relative_l2(const Tensor& a, const Tensor& b) {
  double difference = 0, size = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a.as<float>()[i]) - b.as<float>()[i];
    difference += d * d, size += static_cast<double>(b.as<float>()[i]) * b.as<float>()[i];
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

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
  ModelConfig config = small_model(2, /*K=*/4);
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

TEST(DeviceModel, WhatIsNotThereIsRefusedByName) {
  ModelConfig config = small_model(2);
  config.layers[1].P = 1;
  DeviceModelOptions options;
  try {
    DeviceLanguageModel::check(config, 2, options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("replicas of experts"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace waybill::cuda
