// SPDX-License-Identifier: Apache-2.0
// Every rule of a layer, broken: the message must name the setting and its value, and nothing may be sent or changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/harness.h"

namespace waybill::test {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(error.what());
  }
  return "nothing was refused";
}

TEST(MoeBadInput, EveryConfigurationRuleNamesItsValues) {
  struct Case {
    std::function<void(MoeConfig&)> spoil;
    int P;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {[](MoeConfig& c) { c.K = 9; }, 1, {"K = 9", "E = 8"}},
      {[](MoeConfig& c) { c.K = 0; }, 1, {"K = 0"}},
      {[](MoeConfig& c) { c.E = 0; }, 1, {"E = 0"}},
      {[](MoeConfig& c) { c.H = 0; }, 1, {"H = 0"}},
      {[](MoeConfig& c) { c.F = -1; }, 1, {"F = -1"}},
      {[](MoeConfig& c) { c.F = std::int64_t{1} << 60; }, 1, {"F = 1152921504606846976", "below 2^31"}},
      {[](MoeConfig& c) { c.shared_F = std::int64_t{1} << 31; }, 1, {"shared_F = 2147483648", "below 2^31"}},
      {[](MoeConfig& c) { c.F = c.H = std::int64_t{1} << 30; }, 1, {"E = 8", "F = 1073741824", "2^60 weights"}},
      {[](MoeConfig&) {}, 3, {"E = 8", "3"}},
      {[](MoeConfig&) {}, 0, {"P = 0"}},
      {[](MoeConfig& c) { c.latent = -2; }, 1, {"latent = -2"}},
      {[](MoeConfig& c) { c.shared_F = -3; }, 1, {"shared_F = -3"}},
      {[](MoeConfig& c) { c.alignment = 0; }, 1, {"alignment = 0"}},
      {[](MoeConfig& c) { c.aux_coefficient = -0.5f; }, 1, {"aux_coefficient = -0.5"}},
      {[](MoeConfig& c) { c.z_coefficient = NAN; }, 1, {"z_coefficient = nan"}},
      {[](MoeConfig& c) { c.global_coefficient = -1; }, 1, {"global_coefficient = -1"}},
      {[](MoeConfig& c) { c.sequence_coefficient = 1; }, 1, {"sequence_coefficient = 1", "sequence_length"}},
      {[](MoeConfig& c) { c.bias_update_rate = -1; }, 1, {"bias_update_rate = -1"}},
      {[](MoeConfig& c) { c.receive_factor = -1; }, 1, {"receive_factor = -1"}},
      {[](MoeConfig& c) { c.receive_factor = 1.5; }, 1, {"receive_factor = 1.5", "T_max"}},
      {[](MoeConfig& c) { c.mode = ExchangeMode::kCaptured; }, 1, {"captured", "T_max", "0"}},
      {[](MoeConfig& c) { c.T_max = -1; }, 1, {"T_max = -1"}},
      {[](MoeConfig& c) {
         c.activation = {Activation::kClampedSwiGLU, 0.0f, 1.0f};
       },
       1,
       {"limit", "0"}},
      {[](MoeConfig& c) { c.router.num_groups = 3; }, 1, {"3", "8"}},
      {[](MoeConfig& c) { c.router.scaling_factor = INFINITY; }, 1, {"scaling_factor", "inf"}},
      {[](MoeConfig& c) { c.expert_tensor_parallel = 2; }, 3, {"expert_tensor_parallel = 2", "P = 3"}},
      {[](MoeConfig& c) { c.expert_tensor_parallel = 2; }, 2, {"expert_tensor_parallel = 2", "F = 3"}},
      {[](MoeConfig& c) { c.expert_tensor_parallel = 3; }, 9, {"E = 8", "3 ranks"}},
      {[](MoeConfig& c) { c.expert_tensor_parallel = 0; }, 1, {"expert_tensor_parallel = 0"}},
      {[](MoeConfig& c) { c.capacity_factor = -1; }, 1, {"capacity_factor = -1"}},
      {[](MoeConfig& c) { c.pad_to_capacity = true; }, 1, {"pad_to_capacity", "capacity_factor", "0"}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    MoeConfig c = small_config(8, 2, 6, 3);
    cases[i].spoil(c);
    const std::string message = message_of([&] { validate(c, cases[i].P); });
    for (const std::string& word : cases[i].words) EXPECT_THAT(message, HasSubstr(word)) << "case " << i;
  }
  validate(small_config(8, 2, 6, 3), 8);
}

// A layer of one rank with everything switched on, and one legal call to spoil.
class MoeBadCall : public testing::Test {
 protected:
  MoeBadCall() : fabric_(make_single_fabric()) {
    c_ = small_config();
    c_.expert_bias = true, c_.shared_F = 2, c_.latent = 4, c_.bias_update_rate = 0.1f, c_.sequence_coefficient = 0.1f, c_.sequence_length = 2;
    w_ = random_weights(c_, 1, true);
    g_ = w_;
    layer_ = std::make_unique<MoeLayer>(c_, *fabric_, *fabric_);
    parameters_ = views(c_, 4, w_);
    gradients_ = views(c_, 4, g_);
    x_.assign(static_cast<std::size_t>(4 * c_.H), 0.5f);
    out_ = dx_ = x_;
  }

  TensorView view(std::vector<float>& v) { return TensorView::of(v.data(), {4, c_.H}); }
  std::string forward() {
    return message_of([&] { layer_->forward(parameters_, view(x_), view(out_), step_, options_); });
  }
  std::string backward() {
    return message_of([&] { layer_->backward(parameters_, gradients_, view(x_), view(out_), view(dx_), step_); });
  }

  MoeConfig c_;
  std::unique_ptr<Fabric> fabric_;
  Weights<float> w_, g_;
  std::unique_ptr<MoeLayer> layer_;
  MoeTensors parameters_, gradients_;
  std::vector<float> x_, out_, dx_;
  MoeStep step_;
  MoeForwardOptions options_;
};

TEST_F(MoeBadCall, EveryMissingMisshapenOrSurplusTensorIsNamed) {
  struct Field {
    const char* name;
    TensorView MoeTensors::*member;
  };
  const std::vector<Field> fields{{"gate", &MoeTensors::gate},
                                  {"router_bias", &MoeTensors::router_bias},
                                  {"w1", &MoeTensors::w1},
                                  {"w2", &MoeTensors::w2},
                                  {"b1", &MoeTensors::b1},
                                  {"b2", &MoeTensors::b2},
                                  {"shared_w1", &MoeTensors::shared_w1},
                                  {"shared_w2", &MoeTensors::shared_w2},
                                  {"latent_down", &MoeTensors::latent_down},
                                  {"latent_up", &MoeTensors::latent_up}};
  const MoeTensors good = parameters_, good_gradients = gradients_;
  for (const Field& field : fields) {
    SCOPED_TRACE(field.name);
    parameters_ = good;
    parameters_.*field.member = TensorView();
    EXPECT_THAT(forward(), HasSubstr(std::string(field.name) + " is missing"));
    parameters_ = good;
    (parameters_.*field.member).shape[0] += 1;
    EXPECT_THAT(forward(), testing::AllOf(HasSubstr(field.name), HasSubstr("expected f32 ["), HasSubstr("got f32 [")));
    parameters_ = good;
    (parameters_.*field.member).dtype = DType::kBF16;
    EXPECT_THAT(forward(), testing::AllOf(HasSubstr(field.name), HasSubstr("bf16")));
    parameters_ = good;
  }
  layer_->forward(parameters_, view(x_), view(out_), step_, options_);
  for (const Field& field : fields) {
    if (std::string(field.name) == "router_bias") continue;
    gradients_ = good_gradients;
    gradients_.*field.member = TensorView();
    EXPECT_THAT(backward(), HasSubstr("gradient " + std::string(field.name) + " is missing"));
  }
  c_ = small_config();
  layer_ = std::make_unique<MoeLayer>(c_, *fabric_, *fabric_);
  parameters_ = good;
  parameters_.b1 = parameters_.b2 = parameters_.shared_w1 = parameters_.shared_w2 = parameters_.latent_down = TensorView();
  parameters_.w1 = TensorView::of(w_.w1.data(), {4, 6, 6});
  parameters_.w2 = TensorView::of(w_.w2.data(), {4, 6, 3});
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("latent_up was given"), HasSubstr("no use")));
}

TEST_F(MoeBadCall, ActivationsMasksAndRoutesAreChecked) {
  EXPECT_THAT(message_of([&] {
                layer_->forward(parameters_, TensorView::of(x_.data(), {3, 8}), view(out_), step_, options_);
              }),
              testing::AllOf(HasSubstr("x must be [T, H = 6]"), HasSubstr("[3, 8]")));
  EXPECT_THAT(message_of([&] { layer_->forward(parameters_, view(x_), TensorView::of(out_.data(), {2, 6}), step_, options_); }), HasSubstr("out has 2 rows"));
  std::vector<std::uint8_t> mask(3);
  options_.padding_mask = TensorView::of(mask.data(), {3});
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("padding_mask"), HasSubstr("[T = 4]"), HasSubstr("[3]")));
  options_ = {};
  const Route replay(4, 1, 4);
  options_.replay = &replay;
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("K=1"), HasSubstr("K=2")));
  options_ = {};
  std::vector<float> map(20);
  options_.dense_map = TensorView::of(map.data(), {4, 5});
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("dense_map"), HasSubstr("[T = 4, E = 4]"), HasSubstr("[4, 5]")));
  const Route legal(4, 2, 4);
  options_.dense_map = TensorView::of(map.data(), {4, 4});
  options_.replay = &legal;
  EXPECT_THAT(forward(), HasSubstr("excludes replayed routes"));
  options_ = {};
  const std::vector<std::int64_t> counts(3);
  options_.accumulated_counts = &counts;
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("3 entries"), HasSubstr("E = 4")));
  options_ = {};
  options_.loss_tokens = -1;
  EXPECT_THAT(forward(), HasSubstr("loss_tokens = -1"));
  options_ = {};
  EXPECT_THAT(message_of([&] {
                layer_->forward(parameters_, TensorView::of(x_.data(), {3, 6}), TensorView::of(out_.data(), {3, 6}), step_, options_);
              }),
              testing::AllOf(HasSubstr("T = 3"), HasSubstr("sequence_length = 2")));
  options_.training = false;  // no loss, so no rule about sequences
  layer_->forward(parameters_, TensorView::of(x_.data(), {3, 6}), TensorView::of(out_.data(), {3, 6}), step_, options_);
}

TEST_F(MoeBadCall, BackwardNeedsAFreshTrainingForward) {
  EXPECT_THAT(backward(), HasSubstr("backward needs a step"));
  options_.training = false;
  layer_->forward(parameters_, view(x_), view(out_), step_, options_);
  EXPECT_THAT(backward(), HasSubstr("backward needs a step"));
  options_.training = true;
  layer_->forward(parameters_, view(x_), view(out_), step_, options_);
  std::vector<float> short_x(12);
  EXPECT_THAT(message_of([&] {
                layer_->backward(parameters_, gradients_, TensorView::of(short_x.data(), {2, 6}), view(out_), view(dx_), step_);
              }),
              testing::AllOf(HasSubstr("x has 2 rows"), HasSubstr("T = 4")));
  EXPECT_THAT(message_of([&] { layer_->backward(parameters_, gradients_, view(x_), view(out_), view(dx_), step_, NAN); }), HasSubstr("loss_scale = nan"));
  layer_->backward(parameters_, gradients_, view(x_), view(out_), view(dx_), step_);
  EXPECT_THAT(backward(), HasSubstr("no backward has used yet"));
  layer_->forward(parameters_, view(x_), view(out_), step_, options_);
  options_.training = false;  // an evaluation into the same step takes its state away
  layer_->forward(parameters_, view(x_), view(out_), step_, options_);
  EXPECT_THAT(backward(), HasSubstr("backward needs a step"));
}

TEST_F(MoeBadCall, CapturedModeRefusesMoreThanTMaxTokens) {
  c_.mode = ExchangeMode::kCaptured, c_.T_max = 3;
  layer_ = std::make_unique<MoeLayer>(c_, *fabric_, *fabric_);
  EXPECT_THAT(forward(), testing::AllOf(HasSubstr("T = 4"), HasSubstr("T_max = 3")));
  EXPECT_THAT(message_of([&] { layer_->set_receive_factor(-2); }), HasSubstr("receive_factor = -2"));
}

TEST(MoeBadInput, ALayerThatDoesNotFitItsGroupIsRefusedOnEveryRank) {
  const std::string message = message_of([] { run_ranks(3, [](Fabric& fabric) { MoeLayer layer(small_config(8, 2), fabric, fabric); }); });
  EXPECT_THAT(message, testing::AllOf(HasSubstr("E = 8"), HasSubstr("3")));
}

TEST(MoeBadInput, RanksWithDifferentLayersGetOneErrorOnEveryRank) {
  const auto texts_with = [](const std::function<void(MoeConfig&)>& change) {
    std::vector<std::string> texts(4);
    run_ranks(4, [&](Fabric& fabric) {
      MoeConfig config = small_config(8, 2);
      if (fabric.rank() == 2) change(config);
      texts[static_cast<std::size_t>(fabric.rank())] = message_of([&] { MoeLayer layer(config, fabric, fabric); });
    });
    return texts;
  };
  const auto every_rank = [](const std::string& words) { return testing::Each(HasSubstr("the ranks of a layer must have one config: " + words)); };
  EXPECT_THAT(texts_with([](MoeConfig&) {}), testing::Each("nothing was refused"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.overlap_shared = !c.overlap_shared; }), testing::Each("nothing was refused"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.T_max = 64; }), testing::Each("nothing was refused"));  // eager mode takes any T
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.F = 5; }), every_rank("F is 3 on rank 0, but 5 on rank 2"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.aux_coefficient = 0.5f; }), every_rank("aux_coefficient is 0 on rank 0, but 0.5 on rank 2"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.router.score = ScoreFunction::kSigmoid; }), every_rank("router.score"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.router.scaling_factor = 2.5f; }), every_rank("router.scaling_factor is 1 on rank 0, but 2.5 on rank 2"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.recipe.kind = Recipe::kBF16; }), every_rank("recipe.kind"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.recompute = Recompute::kLayer; }), every_rank("recompute"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.activation.kind = Activation::kReluSquared; }), every_rank("activation.kind"));
  EXPECT_THAT(texts_with([](MoeConfig& c) { c.force_dense_map = true; }), every_rank("force_dense_map is 0 on rank 0, but 1 on rank 2"));
}

}  // namespace
}  // namespace waybill::test
