// SPDX-License-Identifier: Apache-2.0
// Published sizes and operations per token of public models, at sequence 4096.
#include "waybill/model_math.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace waybill {
namespace {

ArchitectureConfig gqa(const char* name, std::int64_t layers, std::int64_t H, std::int64_t heads, std::int64_t kv_heads, std::int64_t E, std::int64_t K,
                       std::int64_t F, std::int64_t vocab) {
  ArchitectureConfig c;
  c.name = std::string(name);
  c.num_layers = layers;
  c.H = H;
  c.attention.num_heads = heads;
  c.attention.num_kv_heads = kv_heads;
  c.attention.head_dim = 128;
  c.E = E;
  c.K = K;
  c.F = F;
  c.vocab = vocab;
  return c;
}

ArchitectureConfig deepseek_v3() {
  ArchitectureConfig c = gqa("DeepSeek-V3", 61, 7168, 128, 0, 256, 8, 2048, 129280);
  c.num_dense_layers = 3;
  c.dense_F = 18432;
  c.shared_F = 2048;
  c.router_bias = true;
  c.attention.kind = AttentionKind::kMLA;
  c.attention.q_rank = 1536;
  c.attention.kv_rank = 512;
  c.attention.nope_dim = 128;
  c.attention.rope_dim = 64;
  c.attention.v_dim = 128;
  return c;
}

double billions(std::int64_t n) { return static_cast<double>(n) / 1e9; }
double giga(double flops) { return flops / 1e9; }

TEST(ModelMath, DeepSeekV3) {
  ArchitectureConfig c = deepseek_v3();
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
  ArchitectureConfig c = deepseek_v3();
  c.name = std::string("DeepSeek-V2-Lite");
  c.num_layers = 27;
  c.num_dense_layers = 1;
  c.dense_F = 10944;
  c.H = 2048;
  c.attention.num_heads = 16;
  c.attention.q_rank = 0;
  c.E = 64;
  c.K = 6;
  c.F = 1408;
  c.shared_F = 2 * 1408;
  c.router_bias = false;
  c.vocab = 102400;
  EXPECT_NEAR(billions(count_parameters(c).total()), 15.7, 0.05);
  EXPECT_NEAR(billions(count_parameters(c).active()), 2.7, 0.05);
  EXPECT_NEAR(giga(flops_per_token(c).total()), 16.4, 0.05);
}

TEST(ModelMath, LatentAndReluSquaredExpertsCountTheirOwnMatrices) {
  ArchitectureConfig c = gqa("latent", 1, 64, 1, 1, 16, 4, 32, 100);
  c.latent = 16;
  c.gated = false;
  c.expert_bias = true;
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
    m.layers = {dense, moe, moe};
    const std::unique_ptr<Fabric> world = make_single_fabric();
    LanguageModel model(m, *world, 1);
    std::int64_t total = 0;
    for (const Parameter& p : model.parameters()) total += p.value.size();
    EXPECT_EQ(count_parameters(architecture_of(m)).total(), total);
    EXPECT_EQ(memory_per_rank(architecture_of(m), {}).parameters, total);
  }
}

TEST(ModelMath, MemoryPerRankSpreadsExpertsOnly) {
  const ArchitectureConfig c = gqa("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 8, 768, 151936);
  const ParameterCounts n = count_parameters(c);
  MemoryPlan plan;
  plan.P = 8;
  const MemoryEstimate m = memory_per_rank(c, plan);
  EXPECT_EQ(m.parameters, n.total() - n.experts + n.experts / 8);
  EXPECT_DOUBLE_EQ(m.weights + m.gradients + m.optimizer, 16.0 * static_cast<double>(m.parameters));
  plan.recompute = Recompute::kLayer;
  EXPECT_LT(memory_per_rank(c, plan).activations, m.activations);
  plan.recompute = Recompute::kNone;
  plan.tokens_per_rank *= 2;
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).activations, 2 * m.activations);
}

TEST(ModelMath, ARecipesOperandCopiesAreCounted) {
  ArchitectureConfig c = gqa("two", 3, 64, 4, 2, 8, 2, 32, 100);
  c.num_dense_layers = 1, c.dense_F = 64;
  MemoryPlan plan;
  plan.P = 4;
  plan.tokens_per_rank = 100;
  EXPECT_EQ(memory_per_rank(c, plan).operands, 0);
  // 2 MoE layers, 200 slots and rows; left [200, 64], right [200, 64] (gate and up), weights 2 experts of [64, 64].
  plan.recipe = Recipe::kMXFP8;
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).operands, 2 * 4 * (200 * 64 + 200 * 64 + 2 * 64 * 64));
  plan.recipe = Recipe::kBF16;
  EXPECT_DOUBLE_EQ(memory_per_rank(c, plan).operands, 2 * 2 * (200 * 64 + 200 * 64 + 2 * 64 * 64));
  const MemoryEstimate m = memory_per_rank(c, plan);
  plan.recipe = Recipe::kF32;
  EXPECT_DOUBLE_EQ(m.total() - m.operands, memory_per_rank(c, plan).total());
}

TEST(ModelMath, RefusesContradictionsWithTheValues) {
  ArchitectureConfig c = gqa("bad", 4, 64, 4, 2, 8, 9, 32, 100);
  EXPECT_THAT([&] { count_parameters(c); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("K = 9 exceeds E = 8")));
  c.K = 2;
  MemoryPlan plan;
  plan.P = 3;
  EXPECT_THAT([&] { memory_per_rank(c, plan); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("E = 8 is not divisible by P = 3")));
  c.num_dense_layers = 1;
  EXPECT_THROW(flops_per_token(c), Error);
}

}  // namespace
}  // namespace waybill
