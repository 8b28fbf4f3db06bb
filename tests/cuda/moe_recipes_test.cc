// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs under the recipes of blocks: against the CPU layer of the same recipe and the dense oracle in double, on hard routes, at any P,
// captured and eager.
#include <gmock/gmock.h>

#include "cuda/moe_harness.h"

namespace waybill::cuda {
namespace {

// Relative norms of every output and gradient. near: to the CPU layer of the same recipe on the same routes. Both quantise the same operands by the same rule,
// but the GPU keeps rows, h, a and gradients in bf16 between its products: a value that bf16 moves across a rounding boundary becomes the next code, and
// stochastic draws fall the other way as rarely. latent: the same where the rows themselves are a product's result. far: to the exact layer, as
// tests/moe/recipe_layer_test.cc bounds it. least: no recipe is exact.
struct RecipeBound {
  Recipe recipe;
  double near, latent, least, far;
};
constexpr RecipeBound kBounds[] = {
    {Recipe::kFP8, 0.025, 0.055, 1e-2, 0.12}, {Recipe::kMXFP8, 0.025, 0.055, 1e-2, 0.12}, {Recipe::kNVFP4, 0.06, 0.16, 5e-2, 0.5}};

struct Case {
  RecipeBound bound;
  int P;
};
std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const RecipeBound& bound : kBounds) {
    for (const int P : {1, 2, 4, 8}) all.push_back({bound, P});
  }
  return all;
}

MoeConfig recipe_config(Recipe recipe, std::int64_t E, std::int64_t K, std::int64_t T_max, std::int64_t H = 160, std::int64_t F = 96) {
  MoeConfig c = gpu_config(E, K, T_max, H, F);
  c.recipe.kind = recipe;
  return c;
}
std::vector<std::int64_t> even(int P, std::int64_t T) { return std::vector<std::int64_t>(static_cast<std::size_t>(P), T); }

mt::Result cpu_result(MoeConfig c, Recipe recipe, const mt::Weights<float>& w, mt::Batch batch, const std::vector<std::int32_t>& ids, std::uint64_t seed) {
  c.recipe.kind = recipe, c.combine_wire = CombineWire::kF32, c.mode = ExchangeMode::kEager, c.receive_factor = 0;
  batch.replay = ids;
  mt::RunOptions options;
  options.forward.rounding_seed = seed;
  return mt::run_layer(c, w, batch, options);
}

struct Named {
  std::string name;
  std::vector<float> values;
};
std::vector<Named> tensors(mt::Result& r) {
  std::vector<Named> all = {{"out", r.out}, {"dx", r.dx}};
  r.gradients.for_each([&](const char* name, std::vector<float>& v) {
    if (!v.empty()) all.push_back({std::string("d_") + name, v});
  });
  return all;
}

class MoeRecipe : public ::testing::TestWithParam<Case> {
 protected:
  Recipe recipe() const { return GetParam().bound.recipe; }
  int P() const { return GetParam().P; }

  // One step against the CPU layer of the same recipe and the exact one, and again for the same bits.
  void check(const MoeConfig& c, const mt::Batch& batch, MoeGpuOptions options, const std::string& what, std::uint64_t seed = 7) {
    const mt::Weights<float> w = bf16_weights(c, seed);
    options.rounding_seed = 91;
    GpuMoe gpu(c, P(), w, options);
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    ASSERT_EQ(gpu.first_error(), "") << what;
    mt::Result got = gpu.result();
    mt::Result same = cpu_result(c, recipe(), w, batch, got.ids, 91), exact = cpu_result(c, Recipe::kF32, w, batch, got.ids, 91);
    const std::vector<Named> g = tensors(got), s = tensors(same), e = tensors(exact);
    std::string line;
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double near = norm_error(g[i].values, s[i].values), far = norm_error(g[i].values, e[i].values), recipes_own = norm_error(s[i].values, e[i].values);
      line += fmt::format(" {} {:.4f}/{:.4f}/{:.4f}", g[i].name, near, far, recipes_own);
      const double of_few = batch.T() > 100 ? 1 : 2;  // too few values for a norm to be stable
      EXPECT_LE(near, of_few * (c.latent > 0 ? GetParam().bound.latent : GetParam().bound.near))
          << what << ": " << g[i].name << " to the CPU layer of the same recipe";
      const bool is_recipes = g[i].name != "d_gate" && g[i].name != "d_b1" && g[i].name != "d_b2" && g[i].name != "d_latent_up" && g[i].name != "d_latent_down";
      if (batch.T() <= 100) continue;
      EXPECT_LE(far, GetParam().bound.far) << what << ": " << g[i].name << " to the exact layer";
      if (is_recipes) {
        EXPECT_GE(far, GetParam().bound.least) << what << ": " << g[i].name << " looks like another recipe";
      }
    }
    if (std::getenv("WB_SHOW_ERRORS") != nullptr) fmt::print("{} P {} {}:{}\n", to_string(recipe()), P(), what, line);
    for (std::size_t p = 0; p < got.slots.size(); ++p) {
      EXPECT_TRUE(got.valid[p]) << what;
      EXPECT_EQ(got.slots[p], same.slots[p]) << what << ", rank " << p;
      EXPECT_EQ(got.status[p].flags, kStatusOk) << what << ": " << describe(got.status[p]);
    }
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    expect_same_bits(got, gpu.result(), what + ", repeated");
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, MoeRecipe, ::testing::ValuesIn(all_cases()),
                         [](const auto& param) { return std::string(to_string(param.param.bound.recipe)) + "_P" + std::to_string(param.param.P); });

TEST_P(MoeRecipe, AgreesWithTheCpuLayerOfTheSameRecipe) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(recipe(), 16, 4, 150);
  check(c, bf16_batch(c, even(P(), 150), 107), {}, "even");
  check(c, bf16_batch(c, even(P(), 131), 108), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, "bf16 results");
  check(c, bf16_batch(c, even(P(), 150), 109), {.accumulate = true}, "accumulated");
}

TEST_P(MoeRecipe, HardRoutes) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(recipe(), 16, 4, 140), sparse = recipe_config(recipe(), 128, 3, 20), one = recipe_config(recipe(), 8, 1, 140);
  std::vector<std::int64_t> tokens;
  for (int p = 0; p < P(); ++p) tokens.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : 75 + p));
  check(c, bf16_batch(c, tokens, 110), {}, "ragged");
  check(c, bf16_batch(c, even(P(), 0), 111), {}, "no tokens at all");
  check(sparse, bf16_batch(sparse, even(P(), 20), 112), {}, "empty experts");
  mt::Batch batch = bf16_batch(one, even(P(), 140), 113);
  batch.replay.assign(static_cast<std::size_t>(batch.T()), 5);
  check(one, batch, {}, "all to one expert");
  mt::Batch holes = bf16_batch(c, even(P(), 140), 114);
  for (std::int64_t t = 0; t < holes.T(); ++t) {
    for (int k = 0; k < 4; ++k) holes.replay.push_back(t % 3 == 0 || k == 2 ? -1 : static_cast<std::int32_t>((t + 5 * k) % 16));
  }
  check(c, holes, {}, "routes of -1");
  mt::Batch masked = bf16_batch(c, even(P(), 140), 115);
  for (std::int64_t t = 0; t < masked.T(); ++t) masked.mask.push_back(t % 5 == 2 ? 1 : 0);
  check(c, masked, {}, "padding tokens");
  MoeConfig aligned = c;
  aligned.alignment = 16;
  check(aligned, bf16_batch(aligned, even(P(), 140), 116), {}, "padded groups");
}

TEST_P(MoeRecipe, SharedExpertsLatentWidthsAndActivations) {
  WB_NEEDS_GPU();
  for (int features = 1; features < 4; ++features) {
    MoeConfig c = recipe_config(recipe(), 16, 4, 140);
    if ((features & 1) != 0) c.shared_F = 64;
    if ((features & 2) != 0) c.latent = 96;
    c.activation.kind = features == 1 ? Activation::kClampedSwiGLU : (features == 2 ? Activation::kReluSquared : Activation::kSwiGLU);
    const std::string what = fmt::format("shared {}, latent {}", c.shared_F, c.latent);
    check(c, bf16_batch(c, even(P(), 140), 120), {.accumulate = features == 2}, what);
    std::vector<std::int64_t> ragged = even(P(), 133);
    if (P() > 1) ragged[1] = 0, ragged[0] = 1;
    check(c, bf16_batch(c, ragged, 121), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, what + ", ragged");
  }
}

TEST_P(MoeRecipe, BiasesAndSlicesOfF) {
  WB_NEEDS_GPU();
  for (const int slices : {1, 2}) {
    if (P() % slices != 0) continue;
    MoeConfig c = recipe_config(recipe(), 16, 4, 140, 160, 128);
    c.expert_bias = true, c.expert_tensor_parallel = slices;
    check(c, bf16_batch(c, even(P(), 140), 124), {}, fmt::format("biases, {} slices", slices));
  }
}

TEST_P(MoeRecipe, LargerMatrices) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(recipe(), 32, 8, 256, 512, 320);
  check(c, bf16_batch(c, even(P(), 256 / P()), 122), {}, "larger");
}

TEST_P(MoeRecipe, OtherScalesAndRounding) {
  WB_NEEDS_GPU();
  MoeConfig c = recipe_config(recipe(), 16, 4, 140);
  const mt::Batch batch = bf16_batch(c, even(P(), 140), 123);
  if (recipe() == Recipe::kNVFP4) {
    c.recipe.hadamard = false;
    check(c, batch, {}, "no rotation");
    c.recipe.stochastic_rounding = false;
    check(c, batch, {}, "rounded to nearest");
    return;
  }
  c.recipe.scale_rule = ScaleRule::kFloor;
  if (recipe() == Recipe::kFP8) {
    c.recipe.scale_rule = ScaleRule::kRoundUp, c.recipe.power_of_two_scales = false;
  }
  check(c, batch, {}, "other scales");
}

// The dense loop over tokens in double, which shares no code with the library.
TEST_P(MoeRecipe, StaysNearTheOracle) {
  WB_NEEDS_GPU();
  MoeConfig c = recipe_config(recipe(), 16, 4, 64);
  c.shared_F = 32;
  const mt::Weights<float> w = bf16_weights(c, 5);
  const mt::Batch batch = bf16_batch(c, even(P(), 64), 6);
  GpuMoe gpu(c, P(), w, {});
  gpu.upload(batch), gpu.step();
  const mt::Result got = gpu.result();
  const mt::OracleResult want = mt::Oracle(c).forward(mt::to_double(w), mt::oracle_inputs(c, batch, got.ids));
  const double error = norm_error(got.out, std::vector<float>(want.out.begin(), want.out.end()));
  EXPECT_LE(error, GetParam().bound.far);
  EXPECT_GE(error, GetParam().bound.least);
}

TEST_P(MoeRecipe, RecomputeAndKeptWeightsHaveTheSameBits) {
  WB_NEEDS_GPU();
  MoeConfig c = recipe_config(recipe(), 16, 4, 100);
  c.shared_F = 32;
  const mt::Weights<float> w = bf16_weights(c, 3);
  const mt::Batch batch = bf16_batch(c, even(P(), 100), 4);
  GpuMoe reference(c, P(), w, {});
  reference.upload(batch), reference.step();
  const mt::Result want = reference.result();
  for (const Recompute recompute : {Recompute::kActivation, Recompute::kLayer}) {
    MoeConfig other = c;
    other.recompute = recompute;
    GpuMoe gpu(other, P(), w, {});
    gpu.upload(batch), gpu.step();
    expect_same_bits(want, gpu.result(), fmt::format("recompute {}", static_cast<int>(recompute)));
  }
  MoeGpuOptions again;
  again.layer.resend_rows = true;
  GpuMoe resent(c, P(), w, again);
  resent.upload(batch), resent.step();
  expect_same_bits(want, resent.result(), "rows sent again");
  MoeGpuOptions options;
  options.weights_unchanged = true;
  GpuMoe kept(c, P(), w, options);
  kept.upload(batch), kept.step();
  kept.upload(batch), kept.step();
  expect_same_bits(want, kept.result(), "weights unchanged");
  kept.upload(batch), kept.evaluate();
  EXPECT_TRUE(mt::same_bits(kept.result().out, want.out)) << "evaluation";
}

// Forms that differ in the order of launches alone.
TEST_P(MoeRecipe, ACombineBesideDW1AndASharedExpertBesideDispatchHaveTheSameBits) {
  WB_NEEDS_GPU();
  for (const std::int64_t latent : {0, 96}) {
    for (const std::int64_t shared_F : {0, 64}) {
      for (const bool bias : {false, true}) {
        MoeConfig c = recipe_config(recipe(), 16, 4, 100);
        c.latent = latent, c.shared_F = shared_F, c.expert_bias = bias, c.overlap_shared = false;
        const mt::Weights<float> w = bf16_weights(c, 3);
        MoeGpuOptions options;
        GpuMoe reference(c, P(), w, options);
        c.overlap_shared = true, options.layer.policy.combine_sms = 32;
        bool was_beside = false;
        const CudaStream* main = nullptr;
        options.layer.on_phase = [&](Phase phase, cudaStream_t stream) { was_beside |= phase == Phase::kCombine && main != nullptr && stream != main->get(); };
        GpuMoe gpu(c, P(), w, options);
        main = &gpu.stream();
        const std::string what = fmt::format("latent {}, shared {}, biases {}", latent, shared_F, bias);
        for (std::uint64_t round = 0; round < 2; ++round) {
          const mt::Batch batch = bf16_batch(c, even(P(), 100), 9 + round);
          reference.upload(batch), reference.step();
          gpu.upload(batch), gpu.step();
          ASSERT_EQ(gpu.first_error(), "") << what;
          const mt::Result want = reference.result();
          expect_same_bits(want, gpu.result(), fmt::format("{}, round {}", what, round));
        }
        EXPECT_EQ(was_beside, recipe() != Recipe::kFP8 || shared_F == 0) << what;
        gpu.capture();
        const mt::Batch batch = bf16_batch(c, even(P(), 100), 21);
        reference.upload(batch), reference.step();
        gpu.upload_rows(batch), gpu.replay();
        const mt::Result want = reference.result();
        expect_same_bits(want, gpu.result(), what + ", replay");
      }
    }
  }
}

// An expert's operands, blocks and random numbers depend on its rows and their order alone.
TEST_P(MoeRecipe, WeightGradientsHaveTheBitsOfOneRank) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(recipe(), 16, 2, 160);
  const mt::Weights<float> w = bf16_weights(c, 21);
  const mt::Batch whole = bf16_batch(c, {160}, 22);
  mt::Batch split = whole;
  split.tokens = even(P(), 160 / P());
  GpuMoe one(c, 1, w, {}), many(c, P(), w, {});
  one.upload(whole), one.step(), many.upload(split), many.step();
  const mt::Result want = one.result(), got = many.result();
  EXPECT_EQ(want.ids, got.ids);
  EXPECT_TRUE(mt::same_bits(want.gradients.w1, got.gradients.w1));
  EXPECT_TRUE(mt::same_bits(want.gradients.w2, got.gradients.w2));
}

TEST_P(MoeRecipe, ACapturedStepHasTheBitsOfAnEagerOneOverManyRoutes) {
  WB_NEEDS_GPU();
  MoeConfig c = recipe_config(recipe(), 16, 4, 60);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 4;
  const mt::Weights<float> w = bf16_weights(c, 40);
  GpuMoe eager(c, P(), w, {}), captured(c, P(), w, {});
  std::vector<mt::Batch> batches;
  std::vector<mt::Result> want;
  for (std::uint64_t b = 0; b < 4; ++b) {
    batches.push_back(bf16_batch(c, even(P(), 60), 50 + 2 * b));
    eager.upload(batches.back()), eager.step();
    want.push_back(eager.result());
    EXPECT_EQ(b > 0 && want[b].ids == want[0].ids, false);
  }
  captured.upload(batches[0]), captured.step();
  captured.capture();
  const int rounds = P() <= 2 ? 200 : 40;
  for (int round = 0; round < rounds; ++round) {
    const auto b = static_cast<std::size_t>(round * 3 % 4);
    captured.upload_rows(batches[b]);
    captured.replay();
    if (round < 8 || round % 10 == 0) expect_same_bits(want[b], captured.result(), fmt::format("replay {}", round));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(MoeRecipe, AnExceededBudgetChangesNothing) {
  WB_NEEDS_GPU();
  if (P() == 1) GTEST_SKIP() << "one rank receives what it brings";
  MoeConfig c = recipe_config(recipe(), 16, 1, 16);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1;  // 16 slots a rank
  c.shared_F = 32;
  const mt::Weights<float> w = bf16_weights(c, 60);
  const auto to_first_rank = [&](std::int64_t slots) {
    mt::Batch batch = bf16_batch(c, even(P(), 16), 61);
    for (std::int64_t t = 0; t < batch.T(); ++t) batch.replay.push_back(static_cast<std::int32_t>(t / 16 * (16 / P())));
    for (std::int64_t extra = 0; extra < slots - 16; ++extra) batch.replay[static_cast<std::size_t>(16 + extra)] = 0;
    return batch;
  };
  GpuMoe gpu(c, P(), w, {.accumulate = true});
  const mt::Batch full = to_first_rank(16), over = to_first_rank(17);
  gpu.upload(full), gpu.zero_gradients(), gpu.step();
  const mt::Result got = gpu.result();
  gpu.upload(over), gpu.step();
  const mt::Result after = gpu.result();
  EXPECT_EQ(gpu.report(0).valid, 0);
  EXPECT_TRUE(gpu.status(0).overflowed());
  EXPECT_TRUE(std::all_of(after.out.begin(), after.out.end(), [](float v) { return v == 0.0f; }));
  EXPECT_TRUE(std::all_of(after.dx.begin(), after.dx.end(), [](float v) { return v == 0.0f; }));
  EXPECT_TRUE(mt::same_bits(after.gradients, got.gradients)) << "an invalid step left its mark on the gradients";
  gpu.clear_status();
  gpu.upload(full), gpu.zero_gradients(), gpu.step();
  expect_same_bits(got, gpu.result(), "after an overflow");
}

TEST(MoeRecipeSeeds, NumbersHangOnTheSeedWhereverItLies) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(Recipe::kNVFP4, 16, 4, 80);
  const mt::Weights<float> w = bf16_weights(c, 3);
  const mt::Batch batch = bf16_batch(c, even(2, 80), 4);
  const auto run = [&](std::uint64_t value, const std::uint64_t* pointer) {
    MoeGpuOptions options;
    options.rounding_seed = value, options.rounding_seed_device = pointer;
    GpuMoe gpu(c, 2, w, options);
    gpu.upload(batch), gpu.step();
    return gpu.result();
  };
  const DeviceBuffer memory(8);
  constexpr std::uint64_t kSeed = 77;
  memory.upload(&kSeed, 8);
  const mt::Result one = run(77, nullptr), other = run(78, nullptr), pointed = run(5, memory.as<std::uint64_t>());
  expect_same_bits(one, pointed, "a seed in device memory");
  EXPECT_TRUE(mt::same_bits(one.out, other.out)) << "forward draws nothing";
  EXPECT_FALSE(mt::same_bits(one.dx, other.dx));
  EXPECT_FALSE(mt::same_bits(one.gradients.w1, other.gradients.w1));
}

TEST(MoeRecipeInput, KeptWeightsMustExist) {
  WB_NEEDS_GPU();
  const MoeConfig c = recipe_config(Recipe::kFP8, 16, 4, 30);
  const mt::Weights<float> w = bf16_weights(c, 3);
  GpuMoe gpu(c, 1, w, {});
  gpu.upload(bf16_batch(c, {30}, 4));
  DeviceMoeForward options;
  options.weights_unchanged = true;
  EXPECT_THAT([&] { gpu.forward_with(options); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("weights_unchanged")));
}

}  // namespace
}  // namespace waybill::cuda
