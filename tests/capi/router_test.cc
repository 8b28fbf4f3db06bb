// SPDX-License-Identifier: Apache-2.0
// The C functions give what the C++ functions give; numbers of small cases are worked by hand.
#include "waybill/router.h"

#include <cmath>

#include "capi_testing.h"
#include "waybill/random.h"
#include "waybill/workload.h"

namespace waybill::capi_testing {
namespace {

constexpr std::uint64_t kSeed = 77;

TEST(CApiRouter, ForwardAndBackwardEqualTheCppApi) {
  constexpr std::int64_t T = 13, E = 24, K = 3;
  std::vector<float> logits(T * E), d_weights(T * K);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = random_normal(kSeed, i);
  for (std::size_t i = 0; i < d_weights.size(); ++i) d_weights[i] = random_normal(kSeed + 1, i);

  wb_router_config config{};
  ASSERT_WB_OK(wb_router_config_init(&config, sizeof config));
  config.E = E;
  config.K = K;
  config.score = WB_SIGMOID;
  config.num_groups = 4;
  config.num_kept_groups = 2;
  config.scaling_factor = 2.5f;
  config.z_coefficient = 0.01f;
  RouteMemory memory(T, K, E);
  auto inputs = sized<wb_router_inputs>();
  inputs.logits = tensor(logits.data(), WB_F32, {T, E});
  auto outputs = sized<wb_router_outputs>();
  outputs.route = memory.route;
  std::vector<std::int32_t> offsets(E + 1);
  outputs.offsets = offsets.data();
  auto status = sized<wb_step_status>();
  outputs.status = &status;
  ASSERT_WB_OK(wb_router_forward(&config, &inputs, &outputs, nullptr));

  RouterConfig cpp;
  cpp.E = E;
  cpp.K = K;
  cpp.score = ScoreFunction::kSigmoid;
  cpp.num_groups = 4;
  cpp.num_kept_groups = 2;
  cpp.scaling_factor = 2.5f;
  RouterInputs cpp_inputs;
  cpp_inputs.logits = TensorView::of(logits.data(), {T, E});
  Route route(T, K, E);
  RouterOutputs cpp_outputs;
  cpp_outputs.route = route.view();
  router_forward(cpp, cpp_inputs, cpp_outputs);
  for (std::int64_t i = 0; i < T * K; ++i) {
    EXPECT_EQ(memory.ids[static_cast<std::size_t>(i)], route.view().id(i / K, i % K)) << "seed " << kSeed;
    EXPECT_EQ(memory.weights[static_cast<std::size_t>(i)], route.view().weights[i]);
  }
  EXPECT_EQ(offsets.back(), T * K);
  EXPECT_EQ(status.num_short_rows, 0);

  std::vector<float> d_logits(T * E), cpp_d_logits(T * E);
  const wb_tensor d_logits_tensor = tensor(d_logits.data(), WB_F32, {T, E});
  ASSERT_WB_OK(wb_router_backward(&config, &inputs, &memory.route, d_weights.data(), 1.0f, &d_logits_tensor, nullptr));
  RouterLossConfig losses;
  losses.z_coefficient = 0.01f;
  router_backward(cpp, losses, cpp_inputs, route.view(), d_weights.data(), {}, 1.0f, TensorView::of(cpp_d_logits.data(), {T, E}));
  EXPECT_EQ(d_logits, cpp_d_logits);
  double values[3] = {-1, -1, -1};
  ASSERT_WB_OK(wb_router_losses(&config, &inputs, &memory.route, values, nullptr));
  EXPECT_EQ(values[0], 0.0);
  EXPECT_GT(values[2], 0.0);
}

TEST(CApiRouter, ScoreSumsGiveTheLossesThatTheLogitsGive) {
  constexpr std::int64_t T = 13, E = 24, K = 3;
  std::vector<float> logits(T * E);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = random_normal(kSeed, i);
  logits[3 * E] = NAN;
  wb_router_config config{};
  ASSERT_WB_OK(wb_router_config_init(&config, sizeof config));
  config.E = E, config.K = K, config.score = WB_SIGMOID, config.aux_coefficient = 0.5f, config.z_coefficient = 0.25f;
  RouteMemory memory(T, K, E);
  auto inputs = sized<wb_router_inputs>();
  inputs.logits = tensor(logits.data(), WB_F32, {T, E});
  auto outputs = sized<wb_router_outputs>();
  outputs.route = memory.route;
  std::vector<double> sums(E + 1, NAN);
  std::vector<float> factors(T, NAN);
  wb_status_word word{};
  outputs.score_sums = sums.data(), outputs.status_word = &word, outputs.weight_factors = factors.data();
  ASSERT_WB_OK(wb_router_forward(&config, &inputs, &outputs, nullptr));
  EXPECT_EQ(word.num_nonfinite_rows, 1);
  EXPECT_EQ(factors, std::vector<float>(T, 0.0f));  // the CPU needs none
  double total = 0;
  for (std::size_t e = 0; e < E; ++e) total += sums[e];
  EXPECT_NEAR(total, T, 1e-5);
  double read[3], made[3] = {-1, -1, -1};
  ASSERT_WB_OK(wb_router_losses(&config, &inputs, &memory.route, read, nullptr));
  inputs.score_sums = sums.data();
  ASSERT_WB_OK(wb_router_losses_into(&config, &inputs, &memory.route, made, nullptr));
  for (const int i : {0, 1, 2}) EXPECT_NEAR(made[i], read[i], 1e-6 * read[i]) << i;
  EXPECT_EQ(wb_router_losses_into(&config, &inputs, &memory.route, nullptr, nullptr), WB_INVALID_ARGUMENT);
  // A caller with the header before these fields.
  outputs.struct_size = 112, inputs.struct_size = 488;
  outputs.score_sums = reinterpret_cast<double*>(1);
  ASSERT_WB_OK(wb_router_forward(&config, &inputs, &outputs, nullptr));
}

TEST(CApiRouter, StatusCountsRowsThatCouldNotBeRouted) {
  std::vector<float> logits = {NAN, 1, 2, NAN, NAN, 3};
  wb_router_config config{};
  ASSERT_WB_OK(wb_router_config_init(&config, sizeof config));
  config.E = 3;
  config.K = 2;
  RouteMemory memory(2, 2, 3);
  auto inputs = sized<wb_router_inputs>();
  inputs.logits = tensor(logits.data(), WB_F32, {2, 3});
  auto outputs = sized<wb_router_outputs>();
  outputs.route = memory.route;
  wb_step_status status{};
  ASSERT_WB_OK(wb_step_status_init(&status, sizeof status));
  outputs.status = &status;
  ASSERT_WB_OK(wb_router_forward(&config, &inputs, &outputs, nullptr));
  ASSERT_WB_OK(wb_router_forward(&config, &inputs, &outputs, nullptr));  // sticky: counts add up
  EXPECT_EQ(status.num_nonfinite_rows, 4);
  EXPECT_EQ(status.num_short_rows, 2);
  EXPECT_EQ(memory.ids, (std::vector<std::int16_t>{2, 1, 2, -1}));
}

TEST(CApiRoute, StatsOfAWorkedExample) {
  RouteMemory memory(3, 2, 4);
  memory.ids = {0, 2, 3, 1, 2, 3};
  memory.weights.assign(6, 0.5f);
  memory.counts = {1, 1, 2, 2};
  ASSERT_WB_OK(wb_route_validate(&memory.route, 0));
  auto stats = sized<wb_route_stats>();
  ASSERT_WB_OK(wb_route_get_stats(&memory.route, 2, &stats));
  EXPECT_EQ(stats.num_routes, 6);
  EXPECT_EQ(stats.experts_min, 1);
  EXPECT_EQ(stats.experts_max, 2);
  EXPECT_EQ(stats.hottest_expert, 2);
  EXPECT_EQ(stats.rows_min, 2);
  EXPECT_EQ(stats.rows_max, 3);
  EXPECT_DOUBLE_EQ(stats.rows_mean, 2.5);
  EXPECT_NEAR(stats.entropy, std::log(6.0) - 2.0 / 3 * std::log(2.0), 1e-12);
  memory.ids[1] = 0;  // twice in the row
  EXPECT_EQ(wb_route_validate(&memory.route, 0), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_route_validate(&memory.route, 8), WB_INVALID_ARGUMENT);
}

TEST(CApiRoute, WorkloadsAreThoseOfTheLibrary) {
  waybill::WorkloadConfig config;
  config.workload = waybill::Workload::kRaggedSources, config.seed = 3, config.step = 2, config.T = 31, config.K = 2, config.E = 9;
  std::vector<std::int32_t> ids(62);
  std::vector<std::int64_t> bounds(5);
  ASSERT_WB_OK(wb_workload_ids("W5", 3, 2, 31, 2, 9, 4, ids.data(), bounds.data()));
  EXPECT_EQ(ids, waybill::workload_ids(config));
  EXPECT_EQ(bounds, waybill::workload_bounds(config, 4));
  ASSERT_WB_OK(wb_workload_ids("ragged_sources", 3, 2, 31, 2, 9, 1, ids.data(), nullptr));
  EXPECT_EQ(ids, waybill::workload_ids(config));
  std::int64_t tokens = 0;
  ASSERT_WB_OK(wb_workload_tokens("W9", 31, 2, 9, &tokens));
  EXPECT_EQ(tokens, waybill::few_rows_tokens(9, 2));
  ASSERT_WB_OK(wb_workload_tokens("W0", 31, 2, 9, &tokens));
  EXPECT_EQ(tokens, 31);
  EXPECT_EQ(wb_workload_ids("W5", 3, 2, 31, 10, 9, 4, ids.data(), nullptr), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), ::testing::HasSubstr("K = 10"));
  EXPECT_EQ(wb_workload_ids("W10", 3, 2, 31, 2, 9, 4, ids.data(), nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_workload_ids("W5", 3, 2, 31, 2, 9, 0, ids.data(), nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_workload_ids("W5", 3, 2, -1, 2, 9, 1, ids.data(), nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_workload_ids(nullptr, 3, 2, 31, 2, 9, 1, ids.data(), nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_workload_ids("W5", 3, 2, 31, 2, 9, 1, nullptr, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_EQ(wb_workload_tokens("W9", 31, 2, 9, nullptr), WB_INVALID_ARGUMENT);
}

TEST(CApiGemm, ForwardDgradWgradOfAWorkedExample) {
  // Two groups of rows {0} and {1, 2}, weights [2, 1, 2]: y = a . w of the group.
  std::vector<float> a = {1, 2, 3, 4, 5, 6}, w = {1, 10, 100, 1000}, y(3), dy = {1, 2, 3}, da(6), dw(4, -1.0f);
  const std::vector<std::int32_t> offsets = {0, 1, 3};
  auto args = sized<wb_grouped_gemm_args>();
  args.a = tensor(a.data(), WB_F32, {3, 2});
  args.weights = tensor(w.data(), WB_F32, {2, 1, 2});
  args.offsets = tensor(offsets.data(), WB_I32, {3});
  args.y = tensor(y.data(), WB_F32, {3, 1});
  ASSERT_WB_OK(wb_grouped_gemm(&args, nullptr));
  EXPECT_EQ(y, (std::vector<float>{21, 4300, 6500}));
  args.a.data = da.data();
  args.y.data = dy.data();
  ASSERT_WB_OK(wb_grouped_gemm_dgrad(&args, nullptr));
  EXPECT_EQ(da, (std::vector<float>{1, 10, 200, 2000, 300, 3000}));
  args.a.data = a.data();
  args.weights.data = dw.data();
  ASSERT_WB_OK(wb_grouped_gemm_wgrad(&args, nullptr));
  EXPECT_EQ(dw, (std::vector<float>{1, 2, 21, 26}));
}

}  // namespace
}  // namespace waybill::capi_testing
