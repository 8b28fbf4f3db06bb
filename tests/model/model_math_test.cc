// SPDX-License-Identifier: Apache-2.0
// Published sizes and operations per token of public models, at sequence 4096.
#include "waybill/model_math.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace waybill {
namespace {

// `layers` MoE layers.
ArchitectureConfig gqa(const char* name, std::size_t layers, std::int64_t H, std::int64_t heads, std::int64_t kv_heads, std::int64_t E, std::int64_t K,
                       std::int64_t F, std::int64_t vocab) {
  ArchitectureConfig c;
  c.name = std::string(name);
  c.H = H;
  c.attention.num_heads = heads;
  c.attention.num_kv_heads = kv_heads;
  c.attention.head_dim = 128;
  c.vocab = vocab;
  LayerShape layer;
  layer.is_moe = true;
  layer.E = E;
  layer.K = K;
  layer.F = F;
  c.layers.assign(layers, layer);
  return c;
}

void make_dense(ArchitectureConfig& c, std::size_t layers, std::int64_t F) {
  for (std::size_t i = 0; i < layers; ++i) {
    c.layers[i] = {};
    c.layers[i].dense_F = F;
  }
}

template <class Change>
void each_moe(ArchitectureConfig& c, Change change) {
  for (LayerShape& layer : c.layers) {
    if (layer.is_moe) change(layer);
  }
}

ArchitectureConfig deepseek(const char* name, std::size_t layers, std::int64_t H, std::int64_t heads, std::int64_t q_rank, std::int64_t E, std::int64_t K,
                            std::int64_t F, std::int64_t vocab) {
  ArchitectureConfig c = gqa(name, layers, H, heads, 0, E, K, F, vocab);
  c.attention.kind = AttentionKind::kMLA;
  c.attention.q_rank = q_rank;
  c.attention.kv_rank = 512;
  c.attention.nope_dim = 128;
  c.attention.rope_dim = 64;
  c.attention.v_dim = 128;
  return c;
}

double billions(std::int64_t n) { return static_cast<double>(n) / 1e9; }
double giga(double flops) { return flops / 1e9; }

TEST(ModelMath, DeepSeekV3) {
  ArchitectureConfig c = deepseek("DeepSeek-V3", 61, 7168, 128, 1536, 256, 8, 2048, 129280);
  make_dense(c, 3, 18432);
  each_moe(c, [](LayerShape& layer) { layer.shared_F = 2048, layer.router_bias = true; });
  EXPECT_NEAR(billions(count_parameters(c).total()), 671, 0.5);
  EXPECT_NEAR(billions(count_parameters(c).active()), 37.6, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 249.8, 0.05);
  c.mtp_layers = 1;
  EXPECT_NEAR(giga(flops_per_token(c).total()), 260.0, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).total()), 671, 0.5) << "MTP modules are counted apart";
  EXPECT_GT(count_parameters(c).mtp, std::int64_t{11'000'000'000});
}

TEST(ModelMath, Qwen3A3B) {
  ArchitectureConfig c = gqa("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 8, 768, 151936);
  c.attention.qk_norm = true;
  EXPECT_NEAR(billions(count_parameters(c).total()), 30.5, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).active()), 3.35, 0.005);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 23.0, 0.05);
}

TEST(ModelMath, Qwen3A22B) {
  ArchitectureConfig c = gqa("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 8, 1536, 151936);
  c.attention.qk_norm = true;
  EXPECT_NEAR(billions(count_parameters(c).total()), 235, 0.5);
  EXPECT_NEAR(billions(count_parameters(c).active()), 22.2, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 148.0, 0.05);
}

TEST(ModelMath, Mixtral8x7B) {
  const ArchitectureConfig c = gqa("Mixtral-8x7B", 32, 4096, 32, 8, 8, 2, 14336, 32000);
  EXPECT_NEAR(billions(count_parameters(c).total()), 46.7, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).active()), 12.9, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 79.7, 0.05);
}

TEST(ModelMath, Olmoe1B7B) {
  const ArchitectureConfig c = gqa("OLMoE-1B-7B", 16, 2048, 16, 16, 64, 8, 1024, 50304);
  EXPECT_NEAR(billions(count_parameters(c).total()), 6.9, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).active()), 1.3, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 7.9, 0.05);
}

TEST(ModelMath, DeepSeekV2Lite) {
  ArchitectureConfig c = deepseek("DeepSeek-V2-Lite", 27, 2048, 16, 0, 64, 6, 1408, 102400);
  make_dense(c, 1, 10944);
  each_moe(c, [](LayerShape& layer) { layer.shared_F = 2 * 1408; });
  EXPECT_NEAR(billions(count_parameters(c).total()), 15.7, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).active()), 2.7, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 16.4, 0.05);
}

// The shapes that transformers prints for Qwen3NextForCausalLM: in_proj_qkvz [12288, 2048], in_proj_ba [64, 2048], conv1d [8192, 1, 4],
// A_log and dt_bias [32], norm [128], out_proj [2048, 4096]; attention q_proj [8192, 2048] (query and gate), k and v [512, 2048], o [2048, 4096].
TEST(ModelMath, Qwen3NextLayersHaveTheTensorsOfTheReferenceModel) {
  ArchitectureConfig c = gqa("Qwen3-Next-80B-A3B", 4, 2048, 16, 2, 512, 10, 512, 151936);
  c.attention.head_dim = 256;
  c.attention.qk_norm = true;
  c.attention.output_gate = true;
  c.delta_net = {16, 32, 128, 128, 4};
  for (std::size_t i = 0; i < 3; ++i) c.layers[i].is_delta_net = true;
  const ParameterCounts n = count_parameters(c);
  EXPECT_EQ(n.delta_net, 3 * (12288 * 2048 + 64 * 2048 + 8192 * 4 + 32 + 32 + 2048 * 4096));
  EXPECT_EQ(n.attention, 8192 * 2048 + 2 * 512 * 2048 + 2048 * 4096);
  EXPECT_EQ(n.norms, 4 * 2 * 2048 + 3 * 128 + 2 * 256 + 2048);
  const TokenFlops f = flops_per_token(c);
  EXPECT_DOUBLE_EQ(f.delta_net, 3 * 6.0 * (8192 * 4 + 4 * 32 * 128 * 128));
  EXPECT_DOUBLE_EQ(f.attention, 6.0 * 16 * 256 * 4096);
  const std::int64_t matrices = n.attention + 3 * (12288 * 2048 + 64 * 2048 + 2048 * 4096);
  EXPECT_DOUBLE_EQ(f.linear, 6.0 * static_cast<double>(matrices + n.active_experts));
}

TEST(ModelMath, LatentAndReluSquaredExpertsCountTheirOwnMatrices) {
  ArchitectureConfig c = gqa("latent", 1, 64, 1, 1, 16, 4, 32, 100);
  each_moe(c, [](LayerShape& layer) { layer.latent = 16, layer.gated = false, layer.expert_bias = true; });
  const ParameterCounts n = count_parameters(c);
  EXPECT_EQ(n.experts, 16 * (2 * 32 * 16 + 32 + 16));
  EXPECT_EQ(n.active_experts, n.experts / 4);
  EXPECT_EQ(n.latent, 2 * 16 * 64);
  const std::int64_t attention = 64 * 128 * 4;
  EXPECT_DOUBLE_EQ(flops_per_token(c).linear, 6.0 * static_cast<double>(attention + 4 * 2 * 32 * 16 + 2 * 16 * 64));
}

TEST(ModelMath, ParametersEqualThoseOfAnInstantiatedModel) {
  for (const bool tied : {true, false}) {
    ModelConfig m;
    m.vocab = 50;
    m.H = 32;
    m.num_heads = 4;
    m.num_kv_heads = 2;
    m.head_dim = 8;
    m.seq_len = 16;
    m.qk_norm = true;
    m.tie_embeddings = tied;
    LayerConfig dense, moe;
    dense.dense_F = 40;
    moe.is_moe = true;
    moe.moe.E = 8;
    moe.moe.K = 2;
    moe.moe.F = 24;
    moe.moe.shared_F = 16;
    moe.moe.latent = 12;
    moe.moe.expert_bias = true;
    moe.moe.bias_update_rate = 1e-3f;
    LayerConfig wide = moe;  // layers may differ
    wide.moe.E = 12;
    wide.moe.K = 5;
    wide.moe.F = 20;
    wide.moe.latent = 0;
    wide.moe.activation.kind = Activation::kReluSquared;
    m.layers = {moe, dense, wide, moe};
    const std::unique_ptr<Fabric> world = make_single_fabric();
    LanguageModel model(m, *world, 1);
    std::int64_t total = 0;
    for (const Parameter& p : model.parameters()) total += p.value.size();
    EXPECT_EQ(count_parameters(architecture_of(m)).total(), total);
    EXPECT_EQ(memory_per_rank(architecture_of(m), {}).parameters, total);
  }
}

TEST(ModelMath, MemoryPerRankSpreadsExpertsOnly) {
  ArchitectureConfig c = gqa("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 8, 768, 151936);
  const ParameterCounts n = count_parameters(c);
  MemoryPlan plan;
  each_moe(c, [](LayerShape& layer) { layer.P = 8; });
  const MemoryEstimate m = memory_per_rank(c, plan);
  EXPECT_EQ(m.parameters, n.total() - n.experts + n.experts / 8);
  EXPECT_DOUBLE_EQ(m.weights + m.gradients + m.optimizer, 16.0 * static_cast<double>(m.parameters));
  ArchitectureConfig again = c;
  each_moe(again, [](LayerShape& layer) { layer.recompute = Recompute::kLayer; });
  EXPECT_LT(memory_per_rank(again, plan).activations, m.activations);
  plan.tokens_per_rank *= 2;
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).activations, 2 * m.activations);
  // A rank of 16 experts can get at most 8 routes of every token of all ranks: P times balanced load. More budget than that is never made.
  plan.receive_factor = 8;
  const MemoryEstimate worst = memory_per_rank(c, plan);
  plan.receive_factor = 1e6;
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).activations, worst.activations);
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).receive_window, worst.receive_window);
  EXPECT_GT(worst.activations, 2 * m.activations);
}

// A model of unequal layers needs the sum of what models of one of its layers need beside the tables, and the window of its widest.
TEST(ModelMath, MemoryOfUnequalLayersIsTheSumOverLayers) {
  ArchitectureConfig mixed = gqa("mixed", 3, 64, 4, 2, 8, 2, 32, 100);
  make_dense(mixed, 1, 48);
  mixed.layers[1].P = 4;
  mixed.layers[2].E = 30, mixed.layers[2].K = 5, mixed.layers[2].F = 16, mixed.layers[2].latent = 24, mixed.layers[2].P = 3;
  mixed.layers[2].recompute = Recompute::kActivation, mixed.layers[2].recipe = Recipe::kMXFP8;
  MemoryPlan plan;
  plan.tokens_per_rank = 50;
  const MemoryEstimate all = memory_per_rank(mixed, plan);
  const std::int64_t tables = 2 * 100 * 64 + 64;
  MemoryEstimate sum;
  for (const LayerShape& layer : mixed.layers) {
    ArchitectureConfig one = mixed;
    one.layers = {layer};
    const MemoryEstimate m = memory_per_rank(one, plan);
    sum.parameters += m.parameters - tables;
    sum.activations += m.activations;
    sum.operands += m.operands;
    sum.receive_window = std::max(sum.receive_window, m.receive_window);
  }
  EXPECT_EQ(all.parameters, sum.parameters + tables);
  EXPECT_DOUBLE_EQ(all.activations, sum.activations);
  EXPECT_DOUBLE_EQ(all.operands, sum.operands);
  EXPECT_DOUBLE_EQ(all.receive_window, sum.receive_window);
  // 2 of 8 experts of [64, 64] and [64, 32], 10 of 30 of [32, 24] and [24, 16], each with what is not an expert's.
  const ParameterCounts n = count_parameters(mixed);
  EXPECT_EQ(all.parameters, n.total() - n.experts + 2 * 3 * 32 * 64 + 10 * 3 * 16 * 24);
}

TEST(ModelMath, ARecipesOperandCopiesAreCounted) {
  ArchitectureConfig c = gqa("two", 3, 64, 4, 2, 8, 2, 32, 100);
  make_dense(c, 1, 64);
  each_moe(c, [](LayerShape& layer) { layer.P = 4; });
  MemoryPlan plan;
  plan.tokens_per_rank = 100;
  const auto with = [&](Recipe recipe) {
    each_moe(c, [recipe](LayerShape& layer) { layer.recipe = recipe; });
    return memory_per_rank(c, plan);
  };
  EXPECT_EQ(with(Recipe::kF32).operands, 0);
  // 2 MoE layers, 200 slots and rows; left [200, 64], right [200, 64] (gate and up), weights 2 experts of [64, 64].
  EXPECT_DOUBLE_EQ(with(Recipe::kMXFP8).operands, 2 * 4 * (200 * 64 + 200 * 64 + 2 * 64 * 64));
  const MemoryEstimate m = with(Recipe::kBF16);
  EXPECT_DOUBLE_EQ(m.operands, 2 * 2 * (200 * 64 + 200 * 64 + 2 * 64 * 64));
  EXPECT_DOUBLE_EQ(m.total() - m.operands, with(Recipe::kF32).total());
}

TEST(ModelMath, RefusesContradictionsWithTheValues) {
  const auto refuses = [](const char* text, auto change) {
    ArchitectureConfig c = gqa("bad", 4, 64, 4, 2, 8, 2, 32, 100);
    change(c);
    EXPECT_THAT([&] { memory_per_rank(c, {}); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr(text)));
  };
  refuses("layer 3: K = 9 exceeds E = 8", [](ArchitectureConfig& c) { c.layers[3].K = 9; });
  refuses("layer 1: E = 8 is not divisible by P = 3", [](ArchitectureConfig& c) { c.layers[1].P = 3; });
  refuses("layer 0 is dense and needs dense_F, got 0", [](ArchitectureConfig& c) { c.layers[0].is_moe = false; });
  refuses("a gate on the shared expert needs shared_F", [](ArchitectureConfig& c) { c.layers[2].shared_gate = true; });
  refuses("gated delta nets need", [](ArchitectureConfig& c) { c.layers[2].is_delta_net = true; });
  refuses("more than 1e+15 parameters", [](ArchitectureConfig& c) { c.layers[2].E = 1 << 20, c.layers[2].F = 1 << 28; });
  refuses("layer 3 is dense", [](ArchitectureConfig& c) { make_dense(c, 4, 8), c.mtp_layers = 1; });
  refuses("output gate is counted for grouped-query attention only", [](ArchitectureConfig& c) {
    c.attention.kind = AttentionKind::kMLA;
    c.attention.output_gate = true;
  });
}

}  // namespace
}  // namespace waybill
