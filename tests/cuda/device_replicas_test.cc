// SPDX-License-Identifier: Apache-2.0
// Replicas of experts in training on the GPU, and what a model with them takes of its memory.
#include "core/cuda/dense_matmul.h"
#include "cuda/both_sides.h"
#include "model/cuda/device_memory.h"

namespace waybill::cuda {
namespace {

// Replicas of the experts (W = P x D): groups of P ranks exchange tokens, gradients are summed over what holds the same expert. The CPU's model is one rank,
// and its loss and gradients depend on no layout. Two GPUs are played by one GPU that is named twice: the sums over replicas in other memory.
std::vector<Layout> replicas() {
  return {{2, 1}, {4, 2}, {4, 1}, {8, 2}, {4, 2, /*last_P=*/1}, {4, 4, 2}, {2, 1, 0, {0, 0}}, {4, 2, 0, {0, 0}}, {4, 1, 2, {0, 0}}, {4, 1, 0, {0, 0, 0, 0}}};
}
std::string describe(const Layout& l) { return fmt::format("W {}, P {}, last P {}, {} parts", l.W, l.P, l.last_P, l.devices.size()); }

TEST(DeviceModelReplicas, F27_LossNormAndEveryGradientAgreeWithTheCpuWithinBf16Bounds) {
  WB_NEEDS_GPU();
  for (Layout layout : replicas()) {
    for (const bool more : {false, true}) {
      SCOPED_TRACE(describe(layout));
      BothSides both(layout, 0, /*K=*/8, more);
      double norm = 0;
      const DeviceStepResult gpu = both.gpu_step(0);
      const StepStats cpu = both.cpu_step(0, &norm);
      EXPECT_EQ(gpu.tokens, cpu.tokens);
      EXPECT_EQ(gpu.update.valid, 1);
      EXPECT_NEAR(gpu.update.loss, cpu.loss, 4e-3 * cpu.loss);
      EXPECT_NEAR(gpu.update.norm, norm, 0.02 * norm);
      both.gpu->download_gradients();
      for (std::size_t i = 0; i < both.list.parameters.size(); ++i) {
        const Parameter& p = both.list.parameters[i];
        if (!p.trainable) continue;
        EXPECT_LE(relative_l2(p.grad, both.cpu.parameters()[i].grad), 0.03) << p.name;
      }
      for (const DeviceLayerResult& layer : gpu.layers) {
        std::int64_t routes = 0, slots = 0;
        for (const std::int64_t count : layer.counts) routes += count;
        for (const RankRecord& rank : layer.ranks) slots += rank.slots;
        EXPECT_EQ(routes, 8 * cpu.tokens) << "layer " << layer.layer;
        EXPECT_EQ(slots, routes) << "layer " << layer.layer;
        EXPECT_EQ(layer.ranks.size(), static_cast<std::size_t>(layout.W)) << "layer " << layer.layer;
      }
    }
  }
}

// Ten steps, so that every update so far was the same on all replicas; then every holder of an expert has the same bits: what is downloaded last wins, and a
// second model that starts from it goes on as the first does.
TEST(DeviceModelReplicas, StepsFollowTheCpuAndGoOnFromASavedState) {
  WB_NEEDS_GPU();
  for (const Layout& layout : replicas()) {
    SCOPED_TRACE(describe(layout));
    BothSides both(layout);
    for (int step = 0; step < 10; ++step) {
      const double cpu = both.cpu_step(step).loss, gpu = both.gpu_step(step).update.loss;
      EXPECT_NEAR(gpu, cpu, 0.02 * cpu) << "step " << step;
    }
    (void)both.gpu_values();
    BothSides again(layout);
    for (std::size_t i = 0; i < both.list.parameters.size(); ++i) {
      const auto copy = [](const Tensor& from, const Tensor& to) {
        std::memcpy(to.as<float>(), from.as<float>(), static_cast<std::size_t>(from.size()) * sizeof(float));
      };
      copy(both.list.parameters[i].value, again.list.parameters[i].value);
      if (both.list.parameters[i].trainable) copy(both.gpu_states[i].m, again.gpu_states[i].m), copy(both.gpu_states[i].v, again.gpu_states[i].v);
    }
    again.gpu->upload(again.gpu_states, 10);
    for (int step = 10; step < 13; ++step) EXPECT_EQ(again.gpu_step(step).update.loss, both.gpu_step(step).update.loss) << "step " << step;
    EXPECT_EQ(again.gpu_values(), both.gpu_values());
  }
}

// Auxiliary and global losses count the tokens of all replicas, and of the micro-batches before. Large coefficients: the gate's gradient is mostly theirs.
TEST(DeviceModelReplicas, F09_LossesCountTheTokensOfAllReplicas) {
  WB_NEEDS_GPU();
  for (Layout layout : replicas()) {
    for (const auto& [aux, global] : {std::pair(0.0f, 20.0f), std::pair(20.0f, 0.0f), std::pair(10.0f, 10.0f)}) {
      layout.aux = aux;
      SCOPED_TRACE(fmt::format("{}, aux {}, global {}", describe(layout), aux, global));
      BothSides both(layout, 0, /*K=*/2, /*more=*/false, Recipe::kF32, global);
      const DeviceStepResult gpu = both.gpu_step(0);
      const StepStats cpu = both.cpu_step(0);
      for (std::size_t i = 0; i < gpu.layers.size(); ++i) {
        EXPECT_NEAR(gpu.layers[i].global, cpu.layers[i].global, 2e-3 * cpu.layers[i].global) << "layer " << i;
        EXPECT_NEAR(gpu.layers[i].aux, cpu.layers[i].aux, 2e-3 * cpu.layers[i].aux) << "layer " << i;
      }
      both.gpu->download_gradients();
      for (std::size_t i = 0; i < both.list.parameters.size(); ++i) {
        const Parameter& p = both.list.parameters[i];
        if (!p.trainable || !p.name.ends_with("moe.gate")) continue;
        EXPECT_LE(relative_l2(p.grad, both.cpu.parameters()[i].grad), 0.06) << p.name;
      }
    }
  }
}

TEST(DeviceModelReplicas, RecipesDrawAsTheCpuDoesForEachReplica) {
  WB_NEEDS_GPU();
  for (const Recipe recipe : {Recipe::kFP8, Recipe::kNVFP4}) {
    BothSides both(Layout{4, 2}, 0, /*K=*/8, /*more=*/false, recipe);
    for (int step = 0; step < 3; ++step) {
      both.settings.rounding_seed = 1000 + static_cast<std::uint64_t>(step);
      const DeviceStepResult gpu = both.gpu_step(step);
      const StepStats cpu = both.cpu_step(step);
      EXPECT_NEAR(gpu.update.loss, cpu.loss, (recipe == Recipe::kNVFP4 ? 0.02 : 0.008) * cpu.loss) << to_string(recipe) << ", step " << step;
    }
  }
}

// One group's budget does not hold: no replica may be updated.
TEST(DeviceModelReplicas, AnOverflowOfOneGroupSkipsTheStepOfAll) {
  WB_NEEDS_GPU();
  for (const Layout& layout : {Layout{4, 2}, Layout{4, 2, 0, {0, 0}}}) {
    SCOPED_TRACE(describe(layout));
    BothSides both(layout, 0.5), enough(layout, 2);
    const std::vector<float> before = both.gpu_values();
    const DeviceStepResult skipped = both.gpu_step(0);
    EXPECT_EQ(skipped.update.valid, 0);
    EXPECT_EQ(skipped.update.budgets_held, 0);
    EXPECT_EQ(both.gpu_values(), before);
    both.gpu->set_receive_factor(4);  // more than the worst case of two ranks
    const DeviceStepResult again = both.gpu_step(0), expected = enough.gpu_step(0);
    EXPECT_EQ(again.update.valid, 1);
    EXPECT_EQ(again.update.loss, expected.update.loss);
    EXPECT_EQ(both.gpu_values(), enough.gpu_values());
  }
}

TEST(DeviceModelMemory, GroupsOnAGpuShareTheExperts) {
  DeviceModelOptions options;
  options.B = 2;
  const auto weights = [&](const Layout& layout) {
    options.devices = layout.devices;
    return device_model_memory(small_model(layout), layout.W, options).weights;
  };
  EXPECT_EQ(weights({4, 2}), weights({4, 4}));  // one GPU holds every expert once
  EXPECT_EQ(weights({4, 1}), weights({4, 4}));
  EXPECT_EQ(weights({4, 2, 0, {0, 1}}), weights({4, 4}));  // a replica a GPU
  EXPECT_LT(weights({4, 4, 0, {0, 1}}), weights({4, 4}));  // half of them a GPU
  EXPECT_EQ(weights({8, 4, 0, {0, 1, 2, 3}}), weights({4, 4, 0, {0, 1}}));
}

// A model and its first step take what is predicted, within 5%. By this process's own account: other programs may use the GPU, too.
TEST(DeviceModelMemory, AModelAndItsFirstStepTakeThePredictedMemory) {
  WB_NEEDS_GPU();
  register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
  prepare_dense_matmul(0);  // what a process makes once
  const auto widened = [](const Layout& layout) {
    ModelConfig config = small_model(layout, /*K=*/4);
    config.H = 512;
    for (LayerConfig& layer : config.layers) {
      layer.dense_F = 1024;
      if (layer.is_moe) layer.moe.H = config.H, layer.moe.F = 256;
    }
    return config;
  };
  for (const Layout& layout : {Layout{2, 2}, Layout{4, 2}, Layout{4, 1}, Layout{4, 4, 2}}) {
    for (const std::size_t memory : {std::size_t{0}, std::size_t{1}}) {
      SCOPED_TRACE(fmt::format("{}, memory {}", describe(layout), memory));
      const ModelConfig config = widened(layout);
      const model::ParameterList list = model::make_parameters(widened({1, 1}), 0, kSeed, nullptr);
      const std::vector<OptimizerState> states = make_optimizer_states(list.parameters);
      DeviceModelOptions options;
      options.B = 16, options.memory = memory;
      DeviceLanguageModel::Batches batches(1);
      for (int r = 0; r < layout.W; ++r) batches[0].push_back(model::split_tokens(make_tokens(options.B, static_cast<unsigned>(r)).view(), kSeqLen));
      const AllocationTrace trace;
      DeviceLanguageModel model(config, layout.W, list, options);
      model.upload(states, 0);
      model.queue_step(batches, {{}, 1e-3f, 1.0});
      EXPECT_EQ(model.finish_step().update.valid, 1);
      const double predicted = device_model_memory(config, layout.W, options).total();
      EXPECT_NEAR(static_cast<double>(trace.total_bytes()), predicted, 0.05 * predicted);
    }
  }
}

}  // namespace
}  // namespace waybill::cuda
