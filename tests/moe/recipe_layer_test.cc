// SPDX-License-Identifier: Apache-2.0
// The whole layer under every recipe: near the fp32 layer, one answer at any P, thread count, alignment and recompute, and refusals.
#include <gtest/gtest.h>

#include "moe/harness.h"

namespace waybill::test {
namespace {

MoeConfig recipe_config(Recipe recipe) {
  MoeConfig c = small_config(8, 3, 64, 32);
  c.router.score = ScoreFunction::kSigmoid;
  c.router.renormalise = true;
  c.recipe.kind = recipe;
  return c;
}

Weights<float> scaled_weights(const MoeConfig& c, std::uint64_t seed) {
  Weights<float> w = random_weights(c, seed);
  for (std::vector<float>* v : {&w.w1, &w.w2, &w.shared_w1, &w.shared_w2, &w.latent_down, &w.latent_up}) {
    for (float& value : *v) value *= 0.3f;
  }
  return w;
}

// |a - b| / |b| in the Euclidean norm.
double norm_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d, size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / size);
}

struct Bound {
  Recipe recipe;
  double least, most;  // of every output's and gradient's norm_error against fp32
};
// An element's relative rounding error is at most 2^-9 in bf16, 2^-4 in E4M3 and 1/4 (half as much to nearest) in E2M1; a product has two operands,
// and what arrives here has gone through up to four products.
const Bound kBounds[] = {{Recipe::kBF16, 1e-4, 0.02}, {Recipe::kFP8, 1e-3, 0.12}, {Recipe::kMXFP8, 1e-3, 0.12}, {Recipe::kNVFP4, 1e-2, 0.5}};

class RecipeLayer : public ::testing::TestWithParam<Bound> {};
INSTANTIATE_TEST_SUITE_P(Recipes, RecipeLayer, ::testing::ValuesIn(kBounds), [](const auto& param) { return std::string(to_string(param.param.recipe)); });

TEST_P(RecipeLayer, StaysNearTheFp32LayerAndIsNotIt) {
  for (const int features : {0, 1, 2}) {
    SCOPED_TRACE(fmt::format("features {}", features));
    MoeConfig c = recipe_config(GetParam().recipe);
    c.expert_bias = features == 1;
    c.shared_F = features > 0 ? 64 : 0;
    c.latent = features == 2 ? 32 : 0;
    const Weights<float> w = scaled_weights(c, 310);
    Batch batch = random_batch(c, {150}, 320);
    MoeConfig plain = c;
    plain.recipe.kind = Recipe::kF32;
    const Result exact = run_layer(plain, w, batch);
    for (const std::int32_t id : exact.ids) batch.replay.push_back(id);
    const Result r = run_layer(c, w, batch);
    EXPECT_TRUE(same_bits(r.weights, exact.weights));  // the router is fp32
    const auto check = [&](const char* what, const std::vector<float>& got, const std::vector<float>& want) {
      const double error = norm_error(got, want);
      EXPECT_GE(error, GetParam().least) << what;
      EXPECT_LE(error, GetParam().most) << what;
    };
    check("out", r.out, exact.out);
    check("dx", r.dx, exact.dx);
    check("w1", r.gradients.w1, exact.gradients.w1);
    check("w2", r.gradients.w2, exact.gradients.w2);
    if (c.shared_F > 0) check("shared_w1", r.gradients.shared_w1, exact.gradients.shared_w1);
    if (c.shared_F > 0) check("shared_w2", r.gradients.shared_w2, exact.gradients.shared_w2);
  }
}

// An expert has the same slots in the same order at any P, so its blocks, random numbers and gradients are the same bits; what is summed over
// ranks is within fp32 rounding.
TEST_P(RecipeLayer, GivesOneAnswerAtAnyP) {
  MoeConfig c = recipe_config(GetParam().recipe);
  const Weights<float> w = scaled_weights(c, 410);
  RunOptions options;
  options.forward.rounding_seed = 99;
  const Result alone = run_layer(c, w, random_batch(c, {150}, 420), options);
  for (const std::vector<std::int64_t>& split : {std::vector<std::int64_t>{75, 75}, {1, 149}, {0, 50, 37, 63}, {20, 20, 20, 20, 20, 20, 20, 10}}) {
    SCOPED_TRACE(fmt::format("tokens {}", fmt::join(split, ", ")));
    const Result r = run_layer(c, w, random_batch(c, split, 420), options);
    EXPECT_TRUE(same_bits(r.gradients.w1, alone.gradients.w1));
    EXPECT_TRUE(same_bits(r.gradients.w2, alone.gradients.w2));
    EXPECT_LE(relative_error(r.out, alone.out), 1e-6);
    EXPECT_LE(relative_error(r.dx, alone.dx), 1e-5);
    EXPECT_LE(relative_error(r.gradients.gate, alone.gradients.gate), 1e-5);
  }
}

void expect_same_bits(const Result& a, const Result& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
}

TEST_P(RecipeLayer, HasTheSameBitsForAnyThreadsRecomputeAlignmentAndPath) {
  MoeConfig c = recipe_config(GetParam().recipe);
  c.shared_F = 32, c.expert_bias = true;
  const Weights<float> w = scaled_weights(c, 510);
  const Batch batch = random_batch(c, {60, 41}, 520);
  RunOptions options;
  options.forward.rounding_seed = 5;
  const Result first = run_layer(c, w, batch, options);
  options.pool_threads = 3;
  expect_same_bits(run_layer(c, w, batch, options), first);
  options.pool_threads = 1;
  for (const Recompute recompute : {Recompute::kActivation, Recompute::kLayer}) {
    MoeConfig again = c;
    again.recompute = recompute;
    expect_same_bits(run_layer(again, w, batch, options), first);
  }
  for (const std::int64_t alignment : {16, 128, 3}) {
    MoeConfig aligned = c;
    aligned.alignment = alignment;
    expect_same_bits(run_layer(aligned, w, batch, options), first);
  }
  MoeConfig captured = c;
  captured.mode = ExchangeMode::kCaptured, captured.T_max = 80, captured.receive_factor = 2;
  expect_same_bits(run_layer(captured, w, batch, options), first);
  MoeConfig dense = c;
  dense.force_dense_map = true;
  EXPECT_TRUE(same_bits(run_layer(dense, w, batch, options).gradients.w1, first.gradients.w1));
}

TEST_P(RecipeLayer, RandomNumbersFollowTheSeed) {
  const MoeConfig c = recipe_config(GetParam().recipe);
  const Weights<float> w = scaled_weights(c, 610);
  const Batch batch = random_batch(c, {90}, 620);
  RunOptions options;
  const auto run = [&](std::uint64_t seed) {
    options.forward.rounding_seed = seed;
    return run_layer(c, w, batch, options);
  };
  const Result one = run(1), same = run(1), two = run(2);
  expect_same_bits(one, same);
  EXPECT_TRUE(same_bits(one.out, two.out));  // forward draws nothing
  const bool is_random = GetParam().recipe == Recipe::kNVFP4;
  EXPECT_EQ(same_bits(one.dx, two.dx), !is_random);
  EXPECT_EQ(same_bits(one.gradients.w1, two.gradients.w1), !is_random);
}

TEST(RecipeNvfp4, StochasticGradientsAreUnbiased) {
  MoeConfig c = recipe_config(Recipe::kNVFP4);
  const Weights<float> w = scaled_weights(c, 710);
  const Batch batch = random_batch(c, {40}, 720);
  RunOptions options;
  // Mean over seeds of the gradient against that of one draw: the noise shrinks as 1/sqrt(n), a bias would not.
  std::vector<double> mean;
  std::vector<float> once;
  constexpr int kRuns = 64;
  for (int seed = 0; seed < kRuns; ++seed) {
    options.forward.rounding_seed = static_cast<std::uint64_t>(seed);
    const Result r = run_layer(c, w, batch, options);
    if (mean.empty()) mean.assign(r.dx.size(), 0.0), once = r.dx;
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += static_cast<double>(r.dx[i]) / kRuns;
  }
  MoeConfig nearest = c;
  nearest.recipe.stochastic_rounding = false;
  const Result rounded = run_layer(nearest, w, batch, options);
  // dx without rounding of the gradients: the same weights' codes, full-precision gradients, is not a recipe; the mean itself stands for it.
  const std::vector<float> center(mean.begin(), mean.end());
  const double noise = norm_error(once, center), bias_of_nearest = norm_error(rounded.dx, center);
  EXPECT_GT(noise, 0.05);
  // Two halves of the seeds agree sqrt(kRuns / 2) times better than single draws would.
  std::vector<float> half(mean.size(), 0.0f);
  for (int seed = 0; seed < kRuns / 2; ++seed) {
    options.forward.rounding_seed = static_cast<std::uint64_t>(seed + 1000);
    const Result r = run_layer(c, w, batch, options);
    for (std::size_t i = 0; i < half.size(); ++i) half[i] += r.dx[i] / (kRuns / 2);
  }
  EXPECT_LT(norm_error(half, center), 2.5 * noise / std::sqrt(kRuns / 2.0));
  EXPECT_GT(bias_of_nearest, norm_error(half, center));
}

TEST(RecipeNvfp4, EachOptionChangesTheGradients) {
  MoeConfig c = recipe_config(Recipe::kNVFP4);
  const Weights<float> w = scaled_weights(c, 810);
  const Batch batch = random_batch(c, {90}, 820);
  const Result all = run_layer(c, w, batch);
  c.recipe.hadamard = false;
  const Result no_hadamard = run_layer(c, w, batch);
  EXPECT_TRUE(same_bits(no_hadamard.dx, all.dx));  // the rotation is wgrad's
  EXPECT_FALSE(same_bits(no_hadamard.gradients.w1, all.gradients.w1));
  c.recipe.stochastic_rounding = false;
  EXPECT_FALSE(same_bits(run_layer(c, w, batch).dx, all.dx));
}

TEST(RecipeFp8, F23_ScaleRuleAndScaleKindAreSettings) {
  MoeConfig c = recipe_config(Recipe::kMXFP8);
  const Weights<float> w = scaled_weights(c, 1010);
  const Batch batch = random_batch(c, {50}, 1020);
  const Result up = run_layer(c, w, batch);
  c.recipe.scale_rule = ScaleRule::kFloor;
  const Result down = run_layer(c, w, batch);
  EXPECT_FALSE(same_bits(up.out, down.out));
  c.recipe.kind = Recipe::kFP8, c.recipe.scale_rule = ScaleRule::kRoundUp;
  const Result powers = run_layer(c, w, batch);
  c.recipe.power_of_two_scales = false;
  EXPECT_FALSE(same_bits(run_layer(c, w, batch).out, powers.out));
}

// With slices that hold whole blocks, splitting F over ranks changes the order of a sum only.
TEST(RecipeMxfp8, ExpertTensorParallelSlicesOfWholeBlocksAgree) {
  MoeConfig c = recipe_config(Recipe::kMXFP8);
  c.F = 64;
  const Weights<float> w = scaled_weights(c, 1110);
  const Result whole = run_layer(c, w, random_batch(c, {30, 30}, 1120));
  c.expert_tensor_parallel = 2;
  const Result sliced = run_layer(c, w, random_batch(c, {30, 30}, 1120));
  EXPECT_LE(relative_error(sliced.out, whole.out), 1e-6);
  EXPECT_LE(relative_error(sliced.gradients.w1, whole.gradients.w1), 1e-6);
  EXPECT_LE(relative_error(sliced.gradients.w2, whole.gradients.w2), 1e-6);
}

TEST_P(RecipeLayer, TakesNoTokensAndExtremeValues) {
  MoeConfig c = recipe_config(GetParam().recipe);
  c.shared_F = 32;
  const Weights<float> w = scaled_weights(c, 1210);
  const Result none = run_layer(c, w, random_batch(c, {0, 0}, 1220));
  for (const float value : none.gradients.w1) ASSERT_EQ(value, 0.0f);
  for (const float factor : {1e-30f, 1e-4f, 1e6f}) {
    Batch batch = random_batch(c, {33}, 1230);
    for (float& value : batch.d_out) value *= factor;
    const Result r = run_layer(c, w, batch);
    for (const std::vector<float>* v : {&r.out, &r.dx, &r.gradients.w1, &r.gradients.w2, &r.gradients.shared_w1}) {
      for (const float value : *v) ASSERT_TRUE(std::isfinite(value)) << factor;
    }
    const bool vanished = std::all_of(r.gradients.w2.begin(), r.gradients.w2.end(), [](float value) { return value == 0.0f; });
    EXPECT_FALSE(vanished && factor > 1e-30f) << factor;
  }
}

std::string refusal(const MoeConfig& c, int P = 1) {
  try {
    validate(c, P);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RecipeRefusals, F24_WidthsThatDoNotFitAreNamedWithValueAndMultiple) {
  MoeConfig c = recipe_config(Recipe::kMXFP8);
  c.F = 7984;
  EXPECT_EQ(refusal(c), "F = 7984 does not fit MXFP8: it must be a multiple of 32 (7984 mod 32 = 16)");
  c.recipe.kind = Recipe::kNVFP4;
  EXPECT_EQ(refusal(c), "accepted");
  c.F = 7990;
  EXPECT_EQ(refusal(c), "F = 7990 does not fit NVFP4: it must be a multiple of 16 (7990 mod 16 = 6)");
  c.recipe.kind = Recipe::kFP8;  // 128-wide blocks: the last one is short
  EXPECT_EQ(refusal(c), "accepted");
  c = recipe_config(Recipe::kMXFP8);
  c.H = 70;
  EXPECT_EQ(refusal(c), "H = 70 does not fit MXFP8: it must be a multiple of 32 (70 mod 32 = 6)");
  c.latent = 40;
  EXPECT_EQ(refusal(c), "latent = 40 does not fit MXFP8: it must be a multiple of 32 (40 mod 32 = 8)");
  c.latent = 64;
  EXPECT_EQ(refusal(c), "accepted");
  c.shared_F = 33;
  EXPECT_EQ(refusal(c), "H = 70 does not fit MXFP8: it must be a multiple of 32 (70 mod 32 = 6)");
  c.H = 64;
  EXPECT_EQ(refusal(c), "shared_F = 33 does not fit MXFP8: it must be a multiple of 32 (33 mod 32 = 1)");
  c = recipe_config(Recipe::kMXFP8);
  c.expert_tensor_parallel = 2;
  EXPECT_EQ(refusal(c, 2), "F / expert_tensor_parallel = 16 does not fit MXFP8: it must be a multiple of 32 (16 mod 32 = 16)");
  c.recipe.kind = static_cast<Recipe>(9);
  EXPECT_EQ(refusal(c, 2), "recipe: unknown kind 9");
}

}  // namespace
}  // namespace waybill::test
