// SPDX-License-Identifier: Apache-2.0
// Every product of the expert matmuls under every recipe: equal to the reference quantiser and a double loop over each expert's rows, within
// fp32 rounding of the sum, and not equal to what scales in the other direction would give.
#include "moe/recipe_products.h"

#include <gtest/gtest.h>

#include <cstring>

#include "moe/dense_mlp.h"
#include "moe/experts.h"
#include "moe/harness.h"
#include "ops/quantize/qdq_kernels.h"

namespace waybill::test {
namespace {

constexpr std::uint64_t kSeed = 0x5eed;
const std::vector<Recipe> kRecipes = {Recipe::kF32, Recipe::kBF16, Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4};

// A rank's experts with hard sizes, called as the layer calls them.
class Experts {
 public:
  Experts(Recipe recipe, std::int64_t alignment, bool bias, Activation activation = Activation::kSwiGLU) {
    config.recipe.kind = recipe;
    config.H = 160, config.F = 96, config.E = static_cast<std::int64_t>(sizes.size()), config.K = 1;
    config.activation.kind = activation;
    config.expert_bias = bias;
    config.alignment = alignment;
    I = config.inner_width();
    weights = random_weights(config, 4100);
    spread(weights.w1, config.H);
    spread(weights.w2, config.F);
    tensors = views(config, config.E, weights);
    gradients = weights;
    gradients.for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
    d_tensors = views(config, config.E, gradients);
    make_layout();
    for (std::int64_t e = 0; e < config.E; ++e) ids.push_back(3 * e + 7);
    rows = wild_rows(51), dz = wild_rows(52);
    run();
  }

  Matrix expert_rows(std::size_t e, const std::vector<float>& x) const {
    return matrix_of(sizes[e], config.H, [&](std::int64_t s, std::int64_t c) { return x[static_cast<std::size_t>(row_of(e, s) * config.H + c)]; });
  }
  Matrix expert_slots(std::size_t e, const Tensor& t) const {
    return matrix_of(sizes[e], t.dim(1), [&](std::int64_t s, std::int64_t c) { return t.as<float>()[(layout.expert_offsets[e] + s) * t.dim(1) + c]; });
  }
  static Matrix expert_weights(std::size_t e, const std::vector<float>& w, std::int64_t n, std::int64_t c) {
    return matrix_of(n, c, [&](std::int64_t i, std::int64_t j) { return w[static_cast<std::size_t>((static_cast<std::int64_t>(e) * n + i) * c + j)]; });
  }
  Randomness random(std::uint64_t product, std::size_t e) const { return {kSeed, product, static_cast<std::uint64_t>(ids[e])}; }

  MoeConfig config;
  std::int64_t I = 0;
  std::vector<std::int32_t> sizes = {5, 0, 44, 1, 130, 16, 33};
  ReceiveLayout layout;
  std::vector<std::int64_t> ids;
  Weights<float> weights, gradients;
  MoeTensors tensors, d_tensors;
  std::vector<float> rows, dz;
  Tensor h, a, z, d_rows;
  Tensor y;  // the second matmul's output per slot
  moe::ExpertScratch scratch;
  std::vector<float> d_weight;

 private:
  std::int64_t row_of(std::size_t e, std::int64_t s) const { return layout.slot_row[static_cast<std::size_t>(layout.expert_offsets[e] + s)]; }

  // Every slot has a row of its own, in an order that is not the slots'.
  void make_layout() {
    std::vector<std::int32_t> experts;
    for (std::size_t e = 0; e < sizes.size(); ++e) experts.insert(experts.end(), static_cast<std::size_t>(sizes[e]), static_cast<std::int32_t>(e));
    const auto R = static_cast<std::int64_t>(experts.size());
    std::vector<std::int32_t> shuffled(experts.size());
    for (std::int64_t r = 0; r < R; ++r) shuffled[static_cast<std::size_t>(r)] = experts[static_cast<std::size_t>(r * 97 % R)];
    std::vector<std::int64_t> slots(experts.size() + 1);
    std::iota(slots.begin(), slots.end(), 0);
    const std::vector<float> ones(experts.size(), 1.0f);
    layout = make_receive_layout(1, config.E, {0, R}, slots, shuffled.data(), ones.data(), config.alignment);
  }
  // Rows and columns of very different size: E4M3 rounds alike under every power of two that keeps a value normal, so a scale in the wrong
  // direction shows only beside values 2^18 times larger.
  static void spread(std::vector<float>& values, std::int64_t columns) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto row = i / static_cast<std::size_t>(columns), column = i % static_cast<std::size_t>(columns);
      values[i] *= std::ldexp(0.2f, static_cast<int>(row * 5 % 21) - 10 + static_cast<int>(column * 8 % 21) - 10);
    }
  }
  std::vector<float> wild_rows(std::uint64_t key) const {
    std::vector<float> x = random_values(static_cast<std::size_t>(layout.R() * config.H), key, 1.0f);
    spread(x, config.H);
    return x;
  }
  void run() {
    ThreadPool pool(2);
    const moe::ExpertContext context{config, tensors, layout, ids, kSeed, false, Stream::cpu(&pool), nullptr};
    const TensorView x = TensorView::of(rows.data(), {layout.R(), config.H}), d = TensorView::of(dz.data(), {layout.R(), config.H});
    moe::experts_first_matmul(context, x, scratch, h);
    moe::experts_activation(context, h, a);
    moe::experts_second_matmul(context, a, scratch, z);
    y = Tensor(DType::kF32, {scratch.y.dim(0), scratch.y.dim(1)});
    std::memcpy(y.as<float>(), scratch.y.as<float>(), static_cast<std::size_t>(y.size()) * sizeof(float));
    d_weight.assign(static_cast<std::size_t>(layout.S_padded()), 0.0f);
    moe::experts_backward(context, d_tensors, x, h, a, d, scratch, d_weight.data(), d_rows);
  }
};

class RecipeProducts : public ::testing::TestWithParam<Recipe> {};
INSTANTIATE_TEST_SUITE_P(Recipes, RecipeProducts, ::testing::ValuesIn(kRecipes), [](const auto& param) { return std::string(to_string(param.param)); });

constexpr Direction kRow = Direction::kAlongRow, kColumn = Direction::kAlongColumn;

std::span<const float> slots_of(const Experts& x, std::size_t e, const Tensor& t) {
  return {t.as<float>() + x.layout.expert_offsets[e] * t.dim(1), static_cast<std::size_t>(x.sizes[e] * t.dim(1))};
}
std::span<const float> expert_of(const std::vector<float>& w, std::size_t e, std::size_t size) { return {w.data() + e * size, size}; }

// Adds the bias [I] to a product of rows.
Sums plus_bias(Sums sums, const float* bias, std::int64_t width) {
  for (std::size_t i = 0; i < sums.values.size(); ++i) {
    const double b = bias[i % static_cast<std::size_t>(width)];
    sums.values[i] += b, sums.magnitudes[i] += std::abs(b);
  }
  return sums;
}

struct Options {
  std::int64_t alignment;
  bool bias;
  Activation activation;
};
const Options kOptions[] = {{1, false, Activation::kSwiGLU}, {16, true, Activation::kSwiGLU}, {5, true, Activation::kReluSquared}};

TEST_P(RecipeProducts, ForwardContractsBlocksAlongRows) {
  for (const Options& o : kOptions) {
    const Experts x(GetParam(), o.alignment, o.bias, o.activation);
    for (std::size_t e = 0; e < x.sizes.size(); ++e) {
      SCOPED_TRACE(fmt::format("expert {} of {} slots, alignment {}", e, x.sizes[e], o.alignment));
      const Matrix w1 = operand(GetParam(), x.expert_weights(e, x.weights.w1, x.I, 160), Role::kWeight, kRow, false, {});
      const Matrix w2 = operand(GetParam(), x.expert_weights(e, x.weights.w2, 160, 96), Role::kWeight, kRow, false, {});
      Sums h = product(operand(GetParam(), x.expert_rows(e, x.rows), Role::kRows, kRow, false, {}), w1);
      if (o.bias) h = plus_bias(h, x.weights.b1.data() + static_cast<std::int64_t>(e) * x.I, x.I);
      EXPECT_LE(worst_ratio(slots_of(x, e, x.h), h, 161), 1.0);
      EXPECT_LE(worst_ratio(slots_of(x, e, x.y), product(operand(GetParam(), x.expert_slots(e, x.a), Role::kRows, kRow, false, {}), w2), 96), 1.0);
    }
  }
}

TEST_P(RecipeProducts, DgradContractsBlocksAlongTheGradientsRowsAndTheWeightsColumns) {
  for (const Options& o : kOptions) {
    const Experts x(GetParam(), o.alignment, o.bias, o.activation);
    for (std::size_t e = 0; e < x.sizes.size(); ++e) {
      SCOPED_TRACE(fmt::format("expert {} of {} slots, alignment {}", e, x.sizes[e], o.alignment));
      const Matrix w1 = operand(GetParam(), x.expert_weights(e, x.weights.w1, x.I, 160), Role::kWeight, kColumn, false, {});
      const Matrix w2 = operand(GetParam(), x.expert_weights(e, x.weights.w2, 160, 96), Role::kWeight, kColumn, false, {});
      const Matrix dz = operand(GetParam(), x.expert_rows(e, x.dz), Role::kGradient, kRow, false, x.random(1, e));
      const Matrix dh = operand(GetParam(), x.expert_slots(e, x.scratch.dh), Role::kGradient, kRow, false, x.random(3, e));
      EXPECT_LE(worst_ratio(slots_of(x, e, x.scratch.da), product(dz, transposed(w2)), 160), 1.0);
      EXPECT_LE(worst_ratio(slots_of(x, e, x.scratch.y), product(dh, transposed(w1)), x.I), 1.0);
    }
  }
}

TEST_P(RecipeProducts, WgradContractsBlocksAlongTheSlotsOfEachExpert) {
  for (const Options& o : kOptions) {
    const Experts x(GetParam(), o.alignment, o.bias, o.activation);
    for (std::size_t e = 0; e < x.sizes.size(); ++e) {
      SCOPED_TRACE(fmt::format("expert {} of {} slots, alignment {}", e, x.sizes[e], o.alignment));
      const auto side = [&](const Matrix& m, Role role, std::uint64_t number) {
        return transposed(operand(GetParam(), m, role, kColumn, true, x.random(number, e)));
      };
      const Matrix dz = side(x.expert_rows(e, x.dz), Role::kGradient, 2), a = side(x.expert_slots(e, x.a), Role::kRows, 2);
      const Matrix dh = side(x.expert_slots(e, x.scratch.dh), Role::kGradient, 4), rows = side(x.expert_rows(e, x.rows), Role::kRows, 4);
      EXPECT_LE(worst_ratio(expert_of(x.gradients.w2, e, 160 * 96), product(dz, a), 16 + x.sizes[e]), 1.0);
      EXPECT_LE(worst_ratio(expert_of(x.gradients.w1, e, static_cast<std::size_t>(x.I * 160)), product(dh, rows), 16 + x.sizes[e]), 1.0);
      if (!o.bias) continue;
      const Matrix high = transposed(x.expert_slots(e, x.scratch.dh));  // the bias gradient sums dh itself
      const Matrix ones = matrix_of(1, x.sizes[e], [](std::int64_t, std::int64_t) { return 1.0f; });
      EXPECT_LE(worst_ratio(expert_of(x.gradients.b1, e, static_cast<std::size_t>(x.I)), product(high, ones), x.sizes[e]), 1.0);
    }
  }
}

// The same comparisons against operands with scales in the wrong direction: far outside the bound, so the tests above can fail.
TEST_P(RecipeProducts, ScalesInTheWrongDirectionAreFarOff) {
  if (GetParam() == Recipe::kF32 || GetParam() == Recipe::kBF16) GTEST_SKIP() << "needs a recipe with blocks";
  const Experts x(GetParam(), 1, false);
  const std::size_t e = 4;  // 130 slots: more than one block of every recipe
  const auto far = [](double ratio) { return ratio > 100; };
  const Matrix w1 = x.expert_weights(e, x.weights.w1, x.I, 160);
  const auto rows = [&](Direction direction) { return operand(GetParam(), x.expert_rows(e, x.rows), Role::kRows, direction, false, {}); };
  const Matrix w1_rows = operand(GetParam(), w1, Role::kWeight, kRow, false, {});
  EXPECT_TRUE(far(worst_ratio(slots_of(x, e, x.h), product(rows(kColumn), w1_rows), 160)));
  const auto dh = [&](Direction direction, bool rotate, std::uint64_t number) {
    return operand(GetParam(), x.expert_slots(e, x.scratch.dh), Role::kGradient, direction, rotate, x.random(number, e));
  };
  EXPECT_TRUE(far(worst_ratio(slots_of(x, e, x.scratch.y), product(dh(kColumn, false, 3), transposed(w1_rows)), x.I)));
  const bool rotate = GetParam() == Recipe::kNVFP4;
  const Matrix wgrad_rows = operand(GetParam(), x.expert_rows(e, x.rows), Role::kRows, kColumn, rotate, x.random(4, e));
  EXPECT_TRUE(far(
      worst_ratio(expert_of(x.gradients.w1, e, static_cast<std::size_t>(x.I * 160)), product(transposed(dh(kRow, rotate, 4)), transposed(wgrad_rows)), 146)));
  if (GetParam() != Recipe::kMXFP8) return;  // tiles serve both directions
  EXPECT_TRUE(far(worst_ratio(slots_of(x, e, x.scratch.y), product(dh(kRow, false, 3), transposed(w1_rows)), x.I)));
}

TEST_P(RecipeProducts, AnEmptyExpertHasAGradientOfExactlyZero) {
  const Experts x(GetParam(), 1, true);
  const auto zeros = [](std::span<const float> values) { return std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; }); };
  EXPECT_TRUE(zeros(expert_of(x.gradients.w1, 1, static_cast<std::size_t>(x.I * 160))));
  EXPECT_TRUE(zeros(expert_of(x.gradients.w2, 1, 160 * 96)));
  EXPECT_TRUE(zeros(expert_of(x.gradients.b1, 1, static_cast<std::size_t>(x.I))));
}

// The shared expert's matmuls are those of a routed expert whose slots are the tokens: the same bits from the dense calls.
TEST_P(RecipeProducts, TheSharedExpertIsAnExpertWithAllTokens) {
  MoeConfig c = small_config(1, 1, 64, 48);
  c.recipe.kind = GetParam();
  if (GetParam() == Recipe::kMXFP8) c.F = 64;
  const std::int64_t T = 53, I = c.inner_width();
  const Weights<float> w = random_weights(c, 5100);
  Weights<float> weights = w, routed = w, shared = w;
  for (Weights<float>* g : {&routed, &shared}) g->for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
  const std::vector<float> x = random_values(static_cast<std::size_t>(T * c.H), 61, 1.0f), d = random_values(x.size(), 62, 1.0f);
  const TensorView xv = TensorView::of(x.data(), {T, c.H}), dv = TensorView::of(d.data(), {T, c.H});
  std::vector<std::int64_t> slots(static_cast<std::size_t>(T) + 1);
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(T), 0);
  const std::vector<float> ones(static_cast<std::size_t>(T), 1.0f);
  const ReceiveLayout layout = make_receive_layout(1, 1, {0, T}, slots, zeros.data(), ones.data());
  const std::vector<std::int64_t> ids = {-1};
  const MoeTensors tensors = views(c, 1, weights), d_routed = views(c, 1, routed);
  const moe::ExpertContext context{c, tensors, layout, ids, kSeed, false, Stream::cpu(), nullptr};
  moe::ExpertScratch scratch;
  Tensor h, a, z, d_rows, shared_h, shared_a, da, dh;
  std::vector<float> d_weight(static_cast<std::size_t>(T));
  moe::experts_first_matmul(context, xv, scratch, h);
  moe::experts_activation(context, h, a);
  moe::experts_second_matmul(context, a, scratch, z);
  moe::experts_backward(context, d_routed, xv, h, a, dv, scratch, d_weight.data(), d_rows);

  moe::OperandScratch operands;
  const TensorView w1 = TensorView::of(weights.w1.data(), {I, c.H}), w2 = TensorView::of(weights.w2.data(), {c.H, c.F});
  const moe::SharedExpert expert{c.activation, c.recipe, w1, w2, kSeed, operands, Stream::cpu()};
  const Tensor out = Tensor::zeros(DType::kF32, {T, c.H}), dx = Tensor::zeros(DType::kF32, {T, c.H});
  expert.hidden(xv, shared_h);
  expert.activate(shared_h, shared_a);
  expert.add_output(shared_a, out);
  expert.backward_weights(xv, shared_h, shared_a, dv, TensorView::of(shared.w1.data(), {I, c.H}), TensorView::of(shared.w2.data(), {c.H, c.F}), da, dh);
  expert.add_input_gradient(dh, dx);
  const auto same = [](const Tensor& p, const Tensor& q) {
    return p.size() == q.size() && std::memcmp(p.as<float>(), q.as<float>(), static_cast<std::size_t>(p.size()) * sizeof(float)) == 0;
  };
  EXPECT_TRUE(same(shared_h, h));
  EXPECT_TRUE(same(out, z));
  EXPECT_TRUE(same(dx, d_rows));
  EXPECT_TRUE(same_bits(shared.w1, routed.w1));
  EXPECT_TRUE(same_bits(shared.w2, routed.w2));
}

// Fast paths or references of both ops: the operands have the same bits, so with the same matmul so has everything.
TEST_P(RecipeProducts, AreBitEqualUnderTheQuantisersReference) {
  const Experts fast(GetParam(), 5, true);
  waybill::detail::force_quantize("ref");
  const Experts ref(GetParam(), 5, true);
  waybill::detail::force_quantize("");
  EXPECT_TRUE(same_bits(fast.gradients, ref.gradients));
  EXPECT_EQ(std::memcmp(fast.y.as<float>(), ref.y.as<float>(), static_cast<std::size_t>(fast.y.size()) * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(fast.d_rows.as<float>(), ref.d_rows.as<float>(), static_cast<std::size_t>(fast.d_rows.size()) * sizeof(float)), 0);
}

}  // namespace
}  // namespace waybill::test
