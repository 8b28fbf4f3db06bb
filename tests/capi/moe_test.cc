// SPDX-License-Identifier: Apache-2.0
#include "waybill/moe.h"

#include "capi_testing.h"
#include "waybill/random.h"

namespace waybill::capi_testing {
namespace {

constexpr std::int64_t kT = 12, kH = 8, kE = 4, kK = 2, kF = 6;
constexpr std::uint64_t kSeed = 99;

std::vector<float> normals(std::int64_t count, std::uint64_t key) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.5f * random_normal(kSeed + key, i);
  return values;
}

struct LayerResult {
  std::vector<float> out, dx, d_gate, d_w1, d_w2;
};

// Forward and backward on P ranks through the C ABI; gradients of the gate are summed over ranks.
LayerResult run_layer(int P) {
  const auto x = normals(kT * kH, 1), gate = normals(kE * kH, 2), w1 = normals(kE * 2 * kF * kH, 3), w2 = normals(kE * kH * kF, 4), d_out = normals(kT * kH, 5);
  LayerResult result{std::vector<float>(x.size()), std::vector<float>(x.size()), std::vector<float>(gate.size()), std::vector<float>(w1.size()),
                     std::vector<float>(w2.size())};
  std::vector<std::vector<float>> d_gates(static_cast<std::size_t>(P), std::vector<float>(gate.size()));
  on_ranks(P, [&](wb_fabric* fabric, int rank) {
    const std::int64_t T = kT / P, L = kE / P;
    wb_moe_config config{};
    ASSERT_WB_OK(wb_moe_config_init(&config, sizeof config));
    config.router.E = kE;
    config.router.K = kK;
    config.H = kH;
    config.F = kF;
    wb_moe_layer* layer = nullptr;
    wb_moe_step* step = nullptr;
    ASSERT_WB_OK(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer));
    ASSERT_WB_OK(wb_moe_step_create(&step));
    const auto slice = [rank](const std::vector<float>& all, std::int64_t size) { return all.data() + rank * size; };
    auto parameters = sized<wb_moe_tensors>(), gradients = sized<wb_moe_tensors>();
    parameters.gate = tensor(gate.data(), WB_F32, {kE, kH});
    parameters.w1 = tensor(slice(w1, L * 2 * kF * kH), WB_F32, {L, 2 * kF, kH});
    parameters.w2 = tensor(slice(w2, L * kH * kF), WB_F32, {L, kH, kF});
    gradients = parameters;
    gradients.gate.data = d_gates[static_cast<std::size_t>(rank)].data();
    gradients.w1.data = const_cast<float*>(slice(result.d_w1, L * 2 * kF * kH));
    gradients.w2.data = const_cast<float*>(slice(result.d_w2, L * kH * kF));
    const wb_tensor x_tensor = tensor(slice(x, T * kH), WB_F32, {T, kH}), out = tensor(slice(result.out, T * kH), WB_F32, {T, kH});
    ASSERT_WB_OK(wb_moe_forward(layer, &parameters, &x_tensor, nullptr, &out, step));
    auto info = sized<wb_moe_step_info>();
    ASSERT_WB_OK(wb_moe_step_get_info(step, &info));
    std::int64_t total = 0;
    for (std::int64_t e = 0; e < info.E; ++e) total += info.expert_counts[e];
    EXPECT_EQ(total, kT * kK);
    EXPECT_EQ(info.route.T, T);
    EXPECT_EQ(info.valid, 1);
    EXPECT_WB_OK(wb_route_validate(&info.route, 0));
    const wb_tensor dy = tensor(slice(d_out, T * kH), WB_F32, {T, kH}), dx = tensor(slice(result.dx, T * kH), WB_F32, {T, kH});
    ASSERT_WB_OK(wb_moe_backward(layer, &parameters, &gradients, &x_tensor, &dy, &dx, step, 1.0f));
    wb_moe_step_destroy(step);
    wb_moe_layer_destroy(layer);
  });
  for (const auto& part : d_gates) {
    for (std::size_t i = 0; i < part.size(); ++i) result.d_gate[i] += part[i];
  }
  return result;
}

void expect_near(const std::vector<float>& seen, const std::vector<float>& expected, const char* what) {
  ASSERT_EQ(seen.size(), expected.size());
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_NEAR(seen[i], expected[i], 1e-5) << what << "[" << i << "], seed " << kSeed;
}

TEST(CApiMoe, ResultsDoNotDependOnTheNumberOfRanks) {
  const LayerResult one = run_layer(1), four = run_layer(4);
  expect_near(four.out, one.out, "out");
  expect_near(four.dx, one.dx, "dx");
  expect_near(four.d_gate, one.d_gate, "d_gate");
  expect_near(four.d_w1, one.d_w1, "d_w1");
  expect_near(four.d_w2, one.d_w2, "d_w2");
  double sum = 0;
  for (const float value : one.dx) sum += std::abs(value);
  EXPECT_GT(sum, 0.1) << "the gradient must not be trivially zero";
}

// A replayed route takes the place of the router's choice: every token goes to expert 3 first.
TEST(CApiMoe, ReplayTakesTheGivenRoutes) {
  on_ranks(1, [](wb_fabric* fabric, int) {
    const auto x = normals(kT * kH, 1), gate = normals(kE * kH, 2), w1 = normals(kE * 2 * kF * kH, 3), w2 = normals(kE * kH * kF, 4);
    std::vector<float> out(x.size());
    wb_moe_config config{};
    ASSERT_WB_OK(wb_moe_config_init(&config, sizeof config));
    config.router.E = kE;
    config.router.K = kK;
    config.H = kH;
    config.F = kF;
    wb_moe_layer* layer = nullptr;
    wb_moe_step* step = nullptr;
    ASSERT_WB_OK(wb_moe_layer_create(&config, fabric, fabric, nullptr, &layer));
    ASSERT_WB_OK(wb_moe_step_create(&step));
    auto parameters = sized<wb_moe_tensors>();
    parameters.gate = tensor(gate.data(), WB_F32, {kE, kH});
    parameters.w1 = tensor(w1.data(), WB_F32, {kE, 2 * kF, kH});
    parameters.w2 = tensor(w2.data(), WB_F32, {kE, kH, kF});
    RouteMemory replay(kT, kK, kE);
    for (std::int64_t t = 0; t < kT; ++t) {
      replay.ids[static_cast<std::size_t>(t * kK)] = 3;
      replay.ids[static_cast<std::size_t>(t * kK + 1)] = 1;
    }
    replay.weights.assign(replay.weights.size(), 0.5f);
    replay.counts = {0, kT, 0, kT};
    wb_moe_forward_options options{};
    ASSERT_WB_OK(wb_moe_forward_options_init(&options, sizeof options));
    options.replay = &replay.route;
    const wb_tensor x_tensor = tensor(x.data(), WB_F32, {kT, kH}), out_tensor = tensor(out.data(), WB_F32, {kT, kH});
    ASSERT_WB_OK(wb_moe_forward(layer, &parameters, &x_tensor, &options, &out_tensor, step));
    auto info = sized<wb_moe_step_info>();
    ASSERT_WB_OK(wb_moe_step_get_info(step, &info));
    EXPECT_EQ(std::vector<std::int64_t>(info.expert_counts, info.expert_counts + kE), (std::vector<std::int64_t>{0, kT, 0, kT}));
    wb_moe_step_destroy(step);
    wb_moe_layer_destroy(layer);
  });
}

TEST(CApiMoe, BiasUpdateMovesTowardsTheMean) {
  std::vector<float> bias = {0, 0, 0};
  const std::vector<std::int64_t> counts = {4, 2, 0};
  ASSERT_WB_OK(wb_update_expert_bias(bias.data(), counts.data(), 3, 0.5f, 0));
  EXPECT_EQ(bias, (std::vector<float>{-0.5f, 0, 0.5f}));
  EXPECT_EQ(wb_update_expert_bias(nullptr, counts.data(), 3, 0.5f, 0), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_update_expert_bias(bias.data(), counts.data(), 0, 0.5f, 0), WB_INVALID_ARGUMENT);
}

TEST(CApiMoe, DefaultsAreThoseOfTheCppConfig) {
  wb_moe_config config{};
  ASSERT_WB_OK(wb_moe_config_init(&config, sizeof config));
  const MoeConfig cpp;
  EXPECT_EQ(config.router.renormalise, cpp.router.renormalise ? 1 : 0);
  EXPECT_EQ(config.router.scaling_factor, cpp.router.scaling_factor);
  EXPECT_EQ(config.activation_limit, cpp.activation.limit);
  EXPECT_EQ(config.activation_alpha, cpp.activation.alpha);
  EXPECT_EQ(config.alignment, cpp.alignment);
  EXPECT_EQ(config.receive_factor, cpp.receive_factor);
  EXPECT_EQ(config.expert_tensor_parallel, cpp.expert_tensor_parallel);
  EXPECT_EQ(config.allow_dense_map, cpp.allow_dense_map ? 1 : 0);
}

}  // namespace
}  // namespace waybill::capi_testing
