// SPDX-License-Identifier: Apache-2.0
// One small language model on the GPU, with ranks in any layout, and on the CPU as one rank: the same parameters, tokens and updates.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/model_harness.h"
#include "model/cuda/device_language_model.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"

namespace waybill::cuda {

inline constexpr std::uint64_t kSeed = 11;
inline constexpr std::int64_t kVocab = 64, kSeqLen = 32;

// All mechanisms but auxiliary losses, whose value depends on the split over ranks. K = E leaves no choice of experts that rounding could change.
// `options`: expert biases, and in the last layer the dense-map path.
// P: of every MoE layer. last_P: of the last one, where it differs.
struct Layout {
  int W = 1, P = 1, last_P = 0;
  std::vector<int> devices{0};
  float aux = 0;
};

inline ModelConfig small_model(const Layout& layout, std::int64_t K = 2, bool options = false, Recipe recipe = Recipe::kF32, float global = 0) {
  ModelConfig c;
  c.vocab = kVocab, c.H = 64, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = 16, c.seq_len = kSeqLen, c.qk_norm = true, c.init_std = 0.08f;
  for (int i = 0; i < 3; ++i) {
    LayerConfig& layer = c.layers.emplace_back();
    layer.is_moe = i > 0, layer.dense_F = 96, layer.P = i == 2 && layout.last_P > 0 ? layout.last_P : layout.P;
    layer.moe.E = 8, layer.moe.K = K, layer.moe.F = recipe == Recipe::kF32 ? 48 : 64, layer.moe.recipe.kind = recipe, layer.moe.H = c.H,
    layer.moe.bias_update_rate = i == 2 ? 0.01f : 0.0f;
    layer.moe.router.E = 8, layer.moe.router.K = K, layer.moe.router.score = ScoreFunction::kSigmoid, layer.moe.router.renormalise = true;
    layer.moe.global_coefficient = global, layer.moe.aux_coefficient = layout.aux;
    layer.moe.expert_bias = options, layer.moe.force_dense_map = options && i == 2;
    if (!layer.is_moe) layer.moe = MoeConfig{};
  }
  return c;
}

// Tokens that can be learned: each is followed by one of two. The last sequence ends in padding.
inline Tensor make_tokens(std::int64_t B, unsigned seed) {
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
      : BothSides(Layout{W, W, 0, {0}}, receive_factor, K, more, recipe, global, memory) {}
  explicit BothSides(const Layout& layout, double receive_factor = 0, std::int64_t K = 2, bool more = false, Recipe recipe = Recipe::kF32, float global = 0,
                     std::size_t memory = 0)
      : W_(layout.W),
        fabric_(make_single_fabric()),
        cpu(small_model({1, 1, 0, {0}, layout.aux}, K, more, recipe, global), *fabric_, kSeed),
        states(make_optimizer_states(cpu.parameters())),
        list(model::make_parameters(small_model({1, 1, 0, {0}, layout.aux}, K, more, recipe, global), 0, kSeed, nullptr)),
        gpu_states(make_optimizer_states(list.parameters)) {
    register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
    DeviceModelOptions options;
    options.devices = layout.devices, options.B = kSequences / layout.W, options.micro_batches = kMicroBatches, options.receive_factor = receive_factor,
    options.steps_in_flight = 4;
    options.memory = memory;
    gpu = std::make_unique<DeviceLanguageModel>(small_model(layout, K, more, recipe, global), layout.W, list, options);
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

inline double relative_l2(const Tensor& a, const Tensor& b) {
  double difference = 0, size = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a.as<float>()[i]) - b.as<float>()[i];
    difference += d * d, size += static_cast<double>(b.as<float>()[i]) * b.as<float>()[i];
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

}  // namespace waybill::cuda
