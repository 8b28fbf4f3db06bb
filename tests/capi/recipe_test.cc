// SPDX-License-Identifier: Apache-2.0
// Recipes through the C ABI: the bits of the C++ layer, older structs without them, refusals.
#include <gmock/gmock.h>

#include <cstring>

#include "capi_testing.h"
#include "waybill/moe.h"
#include "waybill/random.h"

namespace waybill::capi_testing {
namespace {

constexpr std::int64_t kTokens = 40, kWidth = 64, kInner = 32, kExperts = 4;

std::vector<float> normals(std::int64_t count, std::uint64_t key) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.3f * random_normal(key, i);
  return values;
}

struct Layer {
  std::vector<float> x = normals(kTokens * kWidth, 1), gate = normals(kExperts * kWidth, 2), w1 = normals(kExperts * 2 * kInner * kWidth, 3),
                     w2 = normals(kExperts * kWidth * kInner, 4), d_out = normals(kTokens * kWidth, 5);
  std::vector<float> out = std::vector<float>(x.size()), dx = out, d_gate = std::vector<float>(gate.size()), d_w1 = std::vector<float>(w1.size()),
                     d_w2 = std::vector<float>(w2.size());
};

wb_moe_config config_of(std::int32_t recipe) {
  wb_moe_config config{};
  EXPECT_WB_OK(wb_moe_config_init(&config, sizeof config));
  config.router.E = kExperts, config.router.K = 2;
  config.H = kWidth, config.F = kInner;
  config.recipe = recipe;
  return config;
}

// Through C. `size` of the config and `options_size` are what an older header would give.
Layer run_c(wb_moe_config config, std::uint64_t seed, std::uint64_t options_size = sizeof(wb_moe_forward_options)) {
  Layer l;
  on_ranks(1, [&](wb_fabric* fabric, int) {
    wb_moe_layer* layer = nullptr;
    wb_moe_step* step = nullptr;
    ASSERT_WB_OK(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer));
    ASSERT_WB_OK(wb_moe_step_create(&step));
    auto parameters = sized<wb_moe_tensors>();
    parameters.gate = tensor(l.gate.data(), WB_F32, {kExperts, kWidth});
    parameters.w1 = tensor(l.w1.data(), WB_F32, {kExperts, 2 * kInner, kWidth});
    parameters.w2 = tensor(l.w2.data(), WB_F32, {kExperts, kWidth, kInner});
    wb_moe_tensors gradients = parameters;
    gradients.gate.data = l.d_gate.data(), gradients.w1.data = l.d_w1.data(), gradients.w2.data = l.d_w2.data();
    wb_moe_forward_options options{};
    ASSERT_WB_OK(wb_moe_forward_options_init(&options, options_size));
    if (options_size > 136) options.rounding_seed = seed;
    const wb_tensor x = tensor(l.x.data(), WB_F32, {kTokens, kWidth}), out = tensor(l.out.data(), WB_F32, {kTokens, kWidth});
    const wb_tensor d_out = tensor(l.d_out.data(), WB_F32, {kTokens, kWidth}), dx = tensor(l.dx.data(), WB_F32, {kTokens, kWidth});
    ASSERT_WB_OK(wb_moe_forward(layer, &parameters, &x, &options, &out, step));
    ASSERT_WB_OK(wb_moe_backward(layer, &parameters, &gradients, &x, &d_out, &dx, step, 1.0f));
    wb_moe_step_destroy(step);
    wb_moe_layer_destroy(layer);
  });
  return l;
}

Layer run_cpp(Recipe recipe, std::uint64_t seed) {
  Layer l;
  MoeConfig config;
  config.H = kWidth, config.F = kInner, config.E = kExperts, config.K = 2;
  config.recipe.kind = recipe;
  run_ranks(1, [&](Fabric& fabric) {
    MoeLayer layer(config, fabric, fabric);
    MoeStep step;
    MoeTensors parameters;
    parameters.gate = TensorView::of(l.gate.data(), {kExperts, kWidth});
    parameters.w1 = TensorView::of(l.w1.data(), {kExperts, 2 * kInner, kWidth});
    parameters.w2 = TensorView::of(l.w2.data(), {kExperts, kWidth, kInner});
    MoeTensors gradients = parameters;
    gradients.gate.data = l.d_gate.data(), gradients.w1.data = l.d_w1.data(), gradients.w2.data = l.d_w2.data();
    MoeForwardOptions options;
    options.rounding_seed = seed;
    const auto view = [](std::vector<float>& v) { return TensorView::of(v.data(), {kTokens, kWidth}); };
    layer.forward(parameters, view(l.x), view(l.out), step, options);
    layer.backward(parameters, gradients, view(l.x), view(l.d_out), view(l.dx), step);
  });
  return l;
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

TEST(CApiRecipe, EveryRecipeHasTheBitsOfTheCppLayer) {
  const Layer fp32 = run_c(config_of(WB_RECIPE_FP32), 0);
  for (const std::int32_t recipe : {WB_RECIPE_FP32, WB_RECIPE_BF16, WB_RECIPE_FP8, WB_RECIPE_MXFP8, WB_RECIPE_NVFP4}) {
    SCOPED_TRACE(recipe);
    const Layer c = run_c(config_of(recipe), 11), cpp = run_cpp(static_cast<Recipe>(recipe), 11);
    EXPECT_TRUE(equal(c.out, cpp.out));
    EXPECT_TRUE(equal(c.dx, cpp.dx));
    EXPECT_TRUE(equal(c.d_w1, cpp.d_w1));
    EXPECT_TRUE(equal(c.d_w2, cpp.d_w2));
    EXPECT_EQ(equal(c.out, fp32.out), recipe == WB_RECIPE_FP32);
    EXPECT_EQ(equal(run_c(config_of(recipe), 12).dx, c.dx), recipe != WB_RECIPE_NVFP4);  // only nvfp4 draws
  }
}

TEST(CApiRecipe, StructsOfOlderHeadersTrainInFp32) {
  wb_moe_config older{};
  ASSERT_WB_OK(wb_moe_config_init(&older, 240));  // sizeof before recipes
  older.router.E = kExperts, older.router.K = 2;
  older.H = kWidth, older.F = kInner;
  older.recipe = WB_RECIPE_NVFP4;  // beyond what the older header has: not read
  const Layer old = run_c(older, 0, 136), fp32 = run_c(config_of(WB_RECIPE_FP32), 0);
  EXPECT_TRUE(equal(old.out, fp32.out));
  EXPECT_TRUE(equal(old.d_w1, fp32.d_w1));
  EXPECT_EQ(wb_moe_config_init(&older, 232), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), ::testing::HasSubstr("config.struct_size is 232, this library (ABI 1) knows 240 to 264"));
}

TEST(CApiRecipe, BadRecipesAreRefusedWithTheValues) {
  on_ranks(1, [](wb_fabric* fabric, int) {
    wb_moe_layer* layer = nullptr;
    wb_moe_config config = config_of(5);
    EXPECT_EQ(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer), WB_INVALID_ARGUMENT);
    EXPECT_STREQ(wb_last_error(), "recipe is 5, allowed are 0 to 4");
    config = config_of(WB_RECIPE_MXFP8);
    config.F = 40;
    EXPECT_EQ(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer), WB_INVALID_ARGUMENT);
    EXPECT_STREQ(wb_last_error(), "F = 40 does not fit MXFP8: it must be a multiple of 32 (40 mod 32 = 8)");
    EXPECT_EQ(layer, nullptr);
  });
}

}  // namespace
}  // namespace waybill::capi_testing
