// SPDX-License-Identifier: Apache-2.0
// Training in every recipe: it learns, repeats to the bit, resumes to the bit, and its recipe is a setting of the run, not of the weights.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>

#include "error_text.h"
#include "run_helper.h"

namespace waybill::test {
namespace {

namespace fs = std::filesystem;
const std::vector<std::string> kRecipes = {"fp32", "bf16", "fp8", "mxfp8", "nvfp4"};

std::vector<std::string> settings(const std::string& recipe, std::vector<std::string> more = {}) {
  more.insert(more.end(), {"moe.recipe=" + recipe, "moe.shared_F=32", "train.sample_tokens=0"});
  return more;
}

TEST(RecipeTraining, EveryRecipeLearnsNearFp32AndIsNotFp32) {
  RunFolder folder;
  std::vector<double> base;
  for (const std::string& recipe : kRecipes) {
    Recording r;
    const TrainResult result = folder.train(recipe, settings(recipe), r);
    ASSERT_EQ(r.losses.size(), 30u) << recipe;
    EXPECT_LT(r.losses.back(), r.losses.front() - 0.5) << recipe;
    ASSERT_FALSE(r.headers.empty());
    for (const LayerHeader& layer : r.headers.front().layers) EXPECT_EQ(layer.recipe, recipe);
    for (const StepMetrics& step : r.steps) EXPECT_TRUE(step.valid) << recipe << " step " << step.step;
    if (base.empty()) {
      base = r.losses;
      continue;
    }
    EXPECT_NE(r.losses, base) << recipe;
    double worst = 0;
    for (std::size_t i = 0; i < base.size(); ++i) worst = std::max(worst, std::abs(r.losses[i] / base[i] - 1));
    std::printf("%s: largest relative difference of a loss from fp32: %.3g, held out %.4f\n", recipe.c_str(), worst, result.held_out_loss);
    EXPECT_LT(worst, recipe == "nvfp4" ? 0.1 : 0.03) << recipe;
  }
}

TEST(RecipeTraining, ARepeatAndOtherThreadsAreBitEqual) {
  for (const std::string recipe : {"mxfp8", "nvfp4"}) {
    RunFolder folder;
    Recording a, b, threads;
    folder.train("a", settings(recipe, {"train.steps=8"}), a);
    folder.train("b", settings(recipe, {"train.steps=8"}), b);
    folder.train("threads", settings(recipe, {"train.steps=8", "train.threads=3"}), threads);
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    EXPECT_EQ(a.norms, threads.norms);
  }
}

// The random numbers of a step are a function of seed and step: a resumed run draws what the whole run draws.
TEST(RecipeTraining, AResumeDrawsTheSameNumbers) {
  RunFolder folder;
  Recording whole, first, rest;
  first.stop_after = 13;
  folder.train("whole", settings("nvfp4", {"train.steps=20"}), whole);
  folder.train("parts", settings("nvfp4", {"train.steps=20"}), first);
  folder.train("parts", settings("nvfp4", {"train.steps=20"}), rest, true);
  std::vector<double> joined = first.norms;
  joined.insert(joined.end(), rest.norms.begin(), rest.norms.end());
  EXPECT_EQ(joined, whole.norms);
}

// Across P only the order of sums over ranks changes, but a value on the border between two codes may fall on the other side: the first
// step agrees within fp32 rounding, later ones within what such flips do.
TEST(RecipeTraining, LossesAgreeAtAnyP) {
  RunFolder folder;
  for (const std::string& recipe : kRecipes) {
    Recording one, four;
    folder.train(recipe + "1", settings(recipe, {"parallel.P=1", "train.steps=10", "moe.aux_coefficient=0", "moe.shared_F=0"}), one);
    folder.train(recipe + "4", settings(recipe, {"parallel.P=4", "train.steps=10", "moe.aux_coefficient=0", "moe.shared_F=0"}), four);
    EXPECT_NEAR(four.losses[0] / one.losses[0], 1, 1e-6) << recipe;
    double worst = 0;
    for (std::size_t i = 0; i < one.losses.size(); ++i) worst = std::max(worst, std::abs(four.losses[i] / one.losses[i] - 1));
    std::printf("%s: largest relative difference of a loss between P = 1 and 4: %.3g\n", recipe.c_str(), worst);
    EXPECT_LT(worst, recipe == "fp32" ? 5e-6 : 5e-3) << recipe;
  }
}

TEST(RecipeTraining, TheRecipeMayChangeAtAResume) {
  RunFolder folder;
  Recording first, rest;
  first.stop_after = 10;
  folder.train("run", settings("nvfp4"), first);
  folder.train("run", settings("bf16", {"train.steps=12"}), rest, true);
  ASSERT_EQ(rest.losses.size(), 2u);
  EXPECT_EQ(rest.headers.front().layers.front().recipe, "bf16");
}

TEST(RecipeTraining, LayersMayDifferInRecipeAndFilesKeepIt) {
  const std::string text = R"(
[model]
num_layers = 3
H = 64
[moe]
E = 4
K = 2
F = 64
recipe = "nvfp4"
stochastic_rounding = false
[[layers]]
index = [2]
moe.recipe = "bf16"
)";
  const RunConfig config = parse_run_config(text, "mixed.toml");
  EXPECT_EQ(config.model.layers[1].moe.recipe.kind, Recipe::kNVFP4);
  EXPECT_FALSE(config.model.layers[1].moe.recipe.stochastic_rounding);
  EXPECT_EQ(config.model.layers[2].moe.recipe.kind, Recipe::kBF16);
  const RunConfig again = parse_run_config(to_toml(config), "again.toml");
  EXPECT_EQ(to_toml(again), to_toml(config));
  EXPECT_EQ(again.model.layers[2].moe.recipe.kind, Recipe::kBF16);
  EXPECT_EQ(model_toml(config).find("recipe"), std::string::npos);  // weights are fp32 in every recipe
}

TEST(RecipeTraining, F24_AWidthThatDoesNotFitIsRefusedWithLayerAndValues) {
  RunFolder folder;
  const RunConfig config = folder.config({"moe.recipe=mxfp8"});
  EXPECT_THAT(error_text([&] { validate(config); }),
              ::testing::HasSubstr("layer 1: shared_F = 16 does not fit MXFP8: it must be a multiple of 32 (16 mod 32 = 16)"));
  EXPECT_THAT(error_text([&] { folder.config({"moe.recipe=fp6"}); }), ::testing::HasSubstr("\"fp32\", \"bf16\", \"fp8\", \"mxfp8\", \"nvfp4\""));
}

}  // namespace
}  // namespace waybill::test
