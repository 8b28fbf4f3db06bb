// SPDX-License-Identifier: Apache-2.0
// The whole model's gradient against finite differences of its loss, parameter by parameter.
#include "model_test_util.h"

namespace waybill {
namespace {

using namespace testing;

// Moves one parameter along its own gradient and compares the change of the loss with |gradient|^2. K = E, so that no route can
// flip between the two evaluations.
void expect_model_gradient(const ModelConfig& config, double tolerance) {
  const std::unique_ptr<Fabric> world = make_single_fabric();
  LanguageModel model(config, *world, 3);
  const Tensor tokens = random_tokens(config, 0, 3);
  const TensorView batch = tokens.view();
  model.forward_backward(std::span(&batch, 1));
  for (Parameter& p : model.parameters()) {
    if (!p.trainable) continue;
    const std::int64_t size = p.value.size();
    double square = 0;
    for (std::int64_t i = 0; i < size; ++i) square += static_cast<double>(p.grad.as<float>()[i]) * p.grad.as<float>()[i];
    ASSERT_GT(square, 0.0) << p.name << " has no gradient";
    const std::vector<float> kept(p.value.as<float>(), p.value.as<float>() + size);
    const double step = 4e-3 / std::sqrt(square);  // the loss changes by about |gradient| * 4e-3
    const auto loss_at = [&](double t) {
      for (std::int64_t i = 0; i < size; ++i) p.value.as<float>()[i] = static_cast<float>(kept[static_cast<std::size_t>(i)] + t * p.grad.as<float>()[i]);
      return model.evaluate(batch);
    };
    const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
    loss_at(0);
    EXPECT_NEAR(slope / square, 1.0, tolerance) << p.name << ", |gradient| " << std::sqrt(square);
  }
}

TEST(ModelGradient, DenseAgreesWithFiniteDifferences) { expect_model_gradient(tiny_model({dense_layer(12), dense_layer(20)}), 5e-3); }

TEST(ModelGradient, QkNormAndOwnHeadAgreeWithFiniteDifferences) {
  ModelConfig c = tiny_model({dense_layer(12)});
  c.qk_norm = true;
  c.tie_embeddings = false;
  expect_model_gradient(c, 5e-3);
}

TEST(ModelGradient, MoeAgreesWithFiniteDifferences) {
  ModelConfig c = tiny_model({dense_layer(12), moe_layer(4, 4, 10)});
  expect_model_gradient(c, 5e-3);
}

TEST(ModelGradient, MoeWithLatentSharedExpertAndBiasesAgreesWithFiniteDifferences) {
  LayerConfig layer = moe_layer(3, 3, 10);
  layer.moe.latent = 8;
  layer.moe.shared_F = 6;
  layer.moe.expert_bias = true;
  layer.moe.router.score = ScoreFunction::kSigmoid;
  expect_model_gradient(tiny_model({layer, moe_layer(4, 4, 6)}), 5e-3);
}

// Auxiliary losses are not in evaluate(): the gradient of loss + aux is compared through the step's own statistics.
TEST(ModelGradient, AuxiliaryLossesAreInTheGradient) {
  LayerConfig layer = moe_layer(4, 4, 6);
  layer.moe.aux_coefficient = 0.5f;
  layer.moe.z_coefficient = 0.1f;
  layer.moe.sequence_coefficient = 0.3f;
  const ModelConfig c = tiny_model({layer});
  const std::unique_ptr<Fabric> world = make_single_fabric();
  LanguageModel model(c, *world, 3);
  const Tensor tokens = random_tokens(c, 0, 3);
  const TensorView batch = tokens.view();
  const StepStats stats = model.forward_backward(std::span(&batch, 1));
  EXPECT_GT(stats.aux_loss, 0.0);
  EXPECT_NEAR(stats.aux_loss, stats.layers[0].aux + stats.layers[0].sequence + stats.layers[0].z, 1e-12);
  for (Parameter& p : model.parameters()) {
    if (p.name != "layers.0.moe.gate") continue;
    const std::vector<float> grad(p.grad.as<float>(), p.grad.as<float>() + p.grad.size()), kept(p.value.as<float>(), p.value.as<float>() + p.value.size());
    double square = 0;
    for (const float g : grad) square += static_cast<double>(g) * g;
    const double step = 4e-3 / std::sqrt(square);
    const auto total_at = [&](double t) {
      for (std::size_t i = 0; i < kept.size(); ++i) p.value.as<float>()[i] = static_cast<float>(kept[i] + t * grad[i]);
      const StepStats s = model.forward_backward(std::span(&batch, 1));
      return s.loss + s.aux_loss;
    };
    EXPECT_NEAR((total_at(step) - total_at(-step)) / (2 * step) / square, 1.0, 5e-3);
    return;
  }
  FAIL() << "no gate";
}

TEST(ModelGradient, PaddingPositionsHaveNoLossAndNoGradient) {
  for (const bool moe : {false, true}) {
    const ModelConfig c = tiny_model({moe ? moe_layer(4, 2, 6) : dense_layer(12)});
    const std::unique_ptr<Fabric> world = make_single_fabric();
    LanguageModel model(c, *world, 3);
    // The same two sequences, once with a third that is all padding.
    const Tensor two = random_tokens(c, 0, 2);
    Tensor three = random_tokens(c, 0, 3);
    std::fill_n(three.as<std::int32_t>() + 2 * (c.seq_len + 1), c.seq_len + 1, -1);
    const TensorView a = two.view(), b = three.view();
    Snapshot plain, padded;
    std::mutex mutex;
    const StepStats s2 = model.forward_backward(std::span(&a, 1));
    collect(model, true, plain, mutex);
    const StepStats s3 = model.forward_backward(std::span(&b, 1));
    collect(model, true, padded, mutex);
    EXPECT_EQ(s2.tokens, 16);
    EXPECT_EQ(s3.tokens, 16);
    EXPECT_EQ(s2.loss, s3.loss);
    EXPECT_EQ(model.evaluate(a), model.evaluate(b));
    expect_close(padded, plain, 1e-6);
    if (moe) {
      EXPECT_EQ(s2.layers[0].counts, s3.layers[0].counts);
    }
  }
}

}  // namespace
}  // namespace waybill
