// SPDX-License-Identifier: Apache-2.0
#include "waybill/optimizer.h"

#include <gmock/gmock.h>

#include <limits>

#include "op_test_util.h"
#include "ops/optimizer/optimizer_ref.h"

namespace waybill {
namespace {

using testing::random_tensor;

Parameter make_parameter(std::int64_t size, bool decay, std::uint64_t key) {
  Parameter p;
  p.name = std::string("p");
  p.value = random_tensor({size}, key);
  p.grad = random_tensor({size}, key + 1);
  p.decay = decay;
  return p;
}

TEST(AdamW, FirstStepMovesByTheLearningRateAgainstTheSign) {
  std::vector<Parameter> parameters;
  parameters.push_back(make_parameter(2, false, 1));
  parameters[0].value.as<float>()[0] = parameters[0].value.as<float>()[1] = 1.0f;
  parameters[0].grad.as<float>()[0] = 5.0f;
  parameters[0].grad.as<float>()[1] = -0.01f;
  std::vector<OptimizerState> states = make_optimizer_states(parameters);
  adamw_step({}, 0.1f, 1.0f, 1, parameters, states);
  EXPECT_NEAR(parameters[0].value.as<float>()[0], 0.9f, 1e-6);
  EXPECT_NEAR(parameters[0].value.as<float>()[1], 1.1f, 1e-6);
}

TEST(AdamW, DecayIsDecoupledFromTheGradient) {
  std::vector<Parameter> parameters;
  parameters.push_back(make_parameter(3, true, 1));
  parameters.push_back(make_parameter(3, false, 1));
  for (Parameter& p : parameters) p.grad.fill_zero();
  const float before = parameters[0].value.as<float>()[1];
  std::vector<OptimizerState> states = make_optimizer_states(parameters);
  OptimizerConfig config;
  config.weight_decay = 0.5f;
  adamw_step(config, 0.1f, 1.0f, 1, parameters, states);
  EXPECT_NEAR(parameters[0].value.as<float>()[1], before * 0.95f, 1e-6);
  EXPECT_EQ(parameters[1].value.as<float>()[1], before);
}

TEST(AdamW, FollowsTheDoubleReferenceForTwentySteps) {
  for (const std::int64_t size : {1, 7, 33}) {
    std::vector<Parameter> parameters;
    parameters.push_back(make_parameter(size, true, 3));
    std::vector<OptimizerState> states = make_optimizer_states(parameters);
    std::vector<double> value(static_cast<std::size_t>(size)), m(value.size()), v(value.size());
    for (std::size_t i = 0; i < value.size(); ++i) value[i] = parameters[0].value.as<float>()[i];
    const OptimizerConfig config;
    for (std::int64_t step = 1; step <= 20; ++step) {
      parameters[0].grad = random_tensor({size}, static_cast<std::uint64_t>(100 + step));
      adamw_step(config, 0.01f, 0.3f, step, parameters, states);
      ref::adamw(config, 0.01f, 0.3f, step, true, size, parameters[0].grad.as<float>(), value.data(), m.data(), v.data());
    }
    for (std::size_t i = 0; i < value.size(); ++i) EXPECT_NEAR(parameters[0].value.as<float>()[i], value[i], 2e-6) << size << " at " << i;
  }
}

TEST(AdamW, ResultsDoNotDependOnHowAParameterIsSplitOrOnThreads) {
  const std::int64_t size = 70001, cut = 33333;
  std::vector<Parameter> whole, parts;
  whole.push_back(make_parameter(size, true, 3));
  for (const auto& [begin, count] : {std::pair{std::int64_t{0}, cut}, std::pair{cut, size - cut}}) {
    Parameter p = make_parameter(count, true, 3);
    for (std::int64_t i = 0; i < count; ++i) {
      p.value.as<float>()[i] = whole[0].value.as<float>()[begin + i];
      p.grad.as<float>()[i] = whole[0].grad.as<float>()[begin + i];
    }
    parts.push_back(std::move(p));
  }
  std::vector<OptimizerState> whole_states = make_optimizer_states(whole), part_states = make_optimizer_states(parts);
  ThreadPool pool(3);
  for (std::int64_t step = 1; step <= 3; ++step) {
    adamw_step({}, 0.01f, 1.0f, step, whole, whole_states, Stream::cpu(&pool));
    adamw_step({}, 0.01f, 1.0f, step, parts, part_states);
  }
  for (std::int64_t i = 0; i < size; ++i)
    ASSERT_EQ(whole[0].value.as<float>()[i], (i < cut ? parts[0].value.as<float>()[i] : parts[1].value.as<float>()[i - cut]));
}

TEST(AdamW, LeavesUntrainableStateAloneAndChecksBeforeItChangesAnything) {
  std::vector<Parameter> parameters;
  parameters.push_back(make_parameter(4, false, 1));
  parameters.push_back(make_parameter(4, false, 2));
  parameters[1].trainable = false;
  parameters[1].grad = Tensor();
  std::vector<OptimizerState> states = make_optimizer_states(parameters);
  EXPECT_FALSE(states[1].m);
  const float kept = parameters[1].value.as<float>()[0], before = parameters[0].value.as<float>()[0];
  adamw_step({}, 0.1f, 1.0f, 1, parameters, states);
  EXPECT_EQ(parameters[1].value.as<float>()[0], kept);
  EXPECT_NE(parameters[0].value.as<float>()[0], before);

  const float now = parameters[0].value.as<float>()[0];
  parameters[1].trainable = true;
  EXPECT_THROW(adamw_step({}, 0.1f, 1.0f, 2, parameters, states), Error);
  EXPECT_THROW(adamw_step({}, 0.1f, 1.0f, 0, std::span(parameters).first(1), std::span(states).first(1)), Error);
  EXPECT_THROW(adamw_step({}, std::numeric_limits<float>::quiet_NaN(), 1.0f, 1, std::span(parameters).first(1), std::span(states).first(1)), Error);
  EXPECT_EQ(parameters[0].value.as<float>()[0], now);
}

TEST(AdamW, RefusesBadSettingsWithTheValue) {
  OptimizerConfig config;
  config.beta2 = 1.0f;
  try {
    validate(config);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("beta2 = 1"));
  }
  config.beta2 = 0.9f;
  config.epsilon = 0;
  EXPECT_THROW(validate(config), Error);
  config.epsilon = 1e-8f;
  config.weight_decay = -1;
  EXPECT_THROW(validate(config), Error);
}

TEST(OptimizerCases, F27_NormCountsEveryExpertOnceAndReplicatedWeightsOnce) {
  // Part a: experts 20 on rank 0 and 100 on rank 1.
  const double a_dense[] = {0.0}, a_experts[] = {20.0, 100.0};
  const double a = norm_from_parts(a_dense, a_experts);
  EXPECT_NEAR(a, 10.954451, 1e-5);
  EXPECT_NEAR(clip_scale(a, 1.0), 0.091287, 1e-6);
  // Part b: experts 1600 and 0.16, replicated 16.
  const double b_dense[] = {16.0}, b_experts[] = {1600.0, 0.16};
  const double b = norm_from_parts(b_dense, b_experts);
  EXPECT_NEAR(b, 40.201493, 4e-5);
  EXPECT_NEAR(clip_scale(b, 1.0), 0.024875, 1e-6);
  // An expert without tokens adds exactly 0; a rank without experts contributes nothing.
  const double with_empty[] = {20.0, 0.0, 100.0};
  EXPECT_EQ(norm_from_parts(a_dense, with_empty), a);
  EXPECT_EQ(norm_from_parts(a_dense, {}), 0.0);
}

TEST(ClipScale, IsOneBelowTheLimitAndWhenOff) {
  EXPECT_EQ(clip_scale(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_scale(1.0, 1.0), 1.0);
  EXPECT_EQ(clip_scale(50.0, 0.0), 1.0);
  EXPECT_EQ(clip_scale(4.0, 1.0), 0.25);
}

}  // namespace
}  // namespace waybill
