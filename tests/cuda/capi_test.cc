// SPDX-License-Identifier: Apache-2.0
// The router's C functions with device memory: they give what the C++ functions give, without a wait, and refuse what cannot work.
#include <gmock/gmock.h>

#include "cuda/router_harness.h"
#include "waybill/waybill.h"

namespace waybill::cuda {
namespace {

using testing::HasSubstr;

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

wb_tensor tensor(const void* data, wb_dtype dtype, std::initializer_list<std::int64_t> shape, int device = 0) {
  wb_tensor t{};
  t.data = const_cast<void*>(data), t.dtype = dtype, t.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  t.device_type = WB_CUDA_DEVICE, t.device_index = device;
  return t;
}

// A sigmoid router with a bias and both losses, on device memory.
struct DeviceCall {
  static constexpr std::int64_t kT = 50, kE = 256, kK = 8;
  static constexpr std::size_t kRoutes = kT * kK, kElements = kT * kE;
  RouterProblem problem;
  std::vector<float> d_weights = std::vector<float>(kRoutes);
  CudaStream cuda_stream;
  DeviceBuffer logits, bias, ids, weights, counts, offsets, word, factors, sums, losses, g, d_logits;
  wb_router_config config{};
  wb_router_inputs inputs = sized<wb_router_inputs>();
  wb_router_outputs outputs = sized<wb_router_outputs>();
  wb_stream stream = sized<wb_stream>();

  DeviceCall()
      : logits(kElements * 4),
        bias(kE * 4),
        ids(kRoutes * 2),
        weights(kRoutes * 4),
        counts(kE * 4),
        offsets(kE * 4 + 4),
        word(sizeof(wb_status_word)),
        factors(kT * 4),
        sums(kE * 8 + 8),
        losses(24),
        g(kRoutes * 4),
        d_logits(kElements * 4) {
    register_router();
    problem.T = kT;
    problem.config.E = kE, problem.config.K = kK, problem.config.score = ScoreFunction::kSigmoid, problem.config.scaling_factor = 2.5f;
    fill_logits(problem, "special", 3);
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::int64_t e = 0; e < kE; ++e) problem.bias.push_back(0.1f * normal(random));
    for (float& v : d_weights) v = normal(random);
    logits.upload(problem.logits.data(), logits.bytes()), bias.upload(problem.bias.data(), bias.bytes()), g.upload(d_weights.data(), g.bytes());
    for (const DeviceBuffer* b : {&ids, &weights, &counts, &offsets, &factors, &sums, &losses, &d_logits}) b->fill(0xcd);
    word.fill(0);
    WB_TRY_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(wb_router_config_init(&config, sizeof config), WB_OK);
    config.E = kE, config.K = kK, config.score = WB_SIGMOID, config.scaling_factor = 2.5f, config.aux_coefficient = 0.5f, config.z_coefficient = 0.25f;
    inputs.logits = tensor(logits.data(), WB_F32, {kT, kE}), inputs.expert_bias = tensor(bias.data(), WB_F32, {kE});
    outputs.route = sized<wb_route>();
    outputs.route.T = kT, outputs.route.K = kK, outputs.route.E = kE, outputs.route.id_dtype = WB_I16, outputs.route.device_type = WB_CUDA_DEVICE;
    outputs.route.ids = ids.data(), outputs.route.weights = weights.as<float>(), outputs.route.counts = counts.as<std::int32_t>();
    outputs.offsets = offsets.as<std::int32_t>(), outputs.status_word = word.as<wb_status_word>(), outputs.weight_factors = factors.as<float>();
    outputs.score_sums = sums.as<double>();
    stream.device_type = WB_CUDA_DEVICE, stream.native = cuda_stream.get();
  }
  // Forward, losses, backward on the stream.
  wb_status queue() {
    wb_status status = wb_router_forward(&config, &inputs, &outputs, &stream);
    inputs.aux_counts = outputs.route.counts, inputs.weight_factors = outputs.weight_factors, inputs.score_sums = outputs.score_sums;
    if (status == WB_OK) status = wb_router_losses_into(&config, &inputs, &outputs.route, losses.as<double>(), &stream);
    const wb_tensor d = tensor(d_logits.data(), WB_F32, {kT, kE});
    if (status == WB_OK) status = wb_router_backward(&config, &inputs, &outputs.route, g.as<float>(), 1.0f, &d, &stream);
    return status;
  }
};

TEST(CApiCuda, ForwardLossesAndBackwardOnAStreamGiveWhatTheReferenceGives) {
  WB_NEEDS_GPU();
  DeviceCall call;
  ASSERT_EQ(call.queue(), WB_OK) << wb_last_error();
  call.cuda_stream.synchronize();
  const auto E = static_cast<std::size_t>(DeviceCall::kE);
  std::vector<std::int16_t> ids(DeviceCall::kRoutes);
  std::vector<float> weights(ids.size()), d_logits(DeviceCall::kElements), want_d(d_logits.size());
  std::vector<std::int32_t> counts(E), offsets(E + 1);
  double losses[3];
  wb_status_word word;
  const auto get = [&] {
    call.ids.download(ids.data(), call.ids.bytes()), call.weights.download(weights.data(), call.weights.bytes());
    call.counts.download(counts.data(), E * 4), call.offsets.download(offsets.data(), E * 4 + 4), call.losses.download(losses, 24);
    call.d_logits.download(d_logits.data(), call.d_logits.bytes()), call.word.download(&word, sizeof(word));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  };
  get();
  RouterResult want = run_reference(call.problem);
  ASSERT_EQ(std::vector<std::int32_t>(ids.begin(), ids.end()), want.ids);
  ASSERT_EQ(counts, want.counts);
  ASSERT_EQ(offsets, want.offsets);
  for (std::size_t i = 0; i < weights.size(); ++i) ASSERT_NEAR(weights[i], want.weights[i], 2e-6f * want.weights[i]);
  EXPECT_EQ(word.num_nonfinite_rows, want.status.num_nonfinite_rows);
  EXPECT_EQ(word.num_short_rows, want.status.num_short_rows);
  EXPECT_GT(word.num_nonfinite_rows, 0);

  RouterInputs in;
  in.logits = TensorView(call.problem.logits.data(), DType::kF32, {DeviceCall::kT, DeviceCall::kE});
  RouteView route;
  route.T = DeviceCall::kT, route.K = DeviceCall::kK, route.E = DeviceCall::kE, route.id_dtype = DType::kI32, route.ids = want.ids.data(),
  route.weights = want.weights.data();
  RouterLossConfig loss_config;
  loss_config.aux_coefficient = 0.5f, loss_config.z_coefficient = 0.25f;
  RouterLossInputs given;
  given.aux_counts = want.counts.data();
  const RouterLosses want_losses = router_impl::losses_ref({call.problem.config, loss_config, in, route, given, Stream{}});
  EXPECT_NEAR(losses[0], want_losses.aux, 3e-6 * want_losses.aux);
  EXPECT_EQ(losses[1], 0.0);
  EXPECT_NEAR(losses[2], want_losses.z, 3e-6 * want_losses.z);
  router_impl::backward_ref({call.problem.config, loss_config, in, route, call.d_weights.data(), given, 1.0f,
                             TensorView::of(want_d.data(), {DeviceCall::kT, DeviceCall::kE}), Stream{}});
  for (std::size_t i = 0; i < want_d.size(); ++i) ASSERT_NEAR(d_logits[i], want_d[i], 4e-6) << i;
  double waited[3] = {-1, -1, -1};
  ASSERT_EQ(wb_router_losses(&call.config, &call.inputs, &call.outputs.route, waited, &call.stream), WB_OK) << wb_last_error();
  EXPECT_EQ(0, std::memcmp(waited, losses, sizeof(losses)));

  // The same calls inside a graph, twice the rows in the counters.
  for (const DeviceBuffer* b : {&call.ids, &call.d_logits, &call.losses}) b->fill(0xcd, call.cuda_stream);
  const std::vector<float> first = d_logits;
  wb_status status = WB_OK;
  const GraphExec graph = GraphExec::capture(call.cuda_stream, [&](cudaStream_t) { status = call.queue(); });
  ASSERT_EQ(status, WB_OK) << wb_last_error();
  graph.launch(call.cuda_stream);
  call.cuda_stream.synchronize();
  get();
  ASSERT_EQ(std::vector<std::int32_t>(ids.begin(), ids.end()), want.ids);
  ASSERT_EQ(d_logits, first);
  EXPECT_EQ(word.num_nonfinite_rows, 2 * want.status.num_nonfinite_rows);
}

TEST(CApiCuda, WeightsOfLossesInDeviceMemoryScaleValuesAndGradients) {
  WB_NEEDS_GPU();
  DeviceCall call;
  for (const bool from_sums : {true, false}) {
    ASSERT_EQ(call.queue(), WB_OK) << wb_last_error();
    if (!from_sums) call.inputs.score_sums = nullptr;
    const float host_weights[3] = {0.5f, 7.0f, 3.0f};
    const DeviceBuffer loss_weights(sizeof host_weights), values(12), d_weighted(call.d_logits.bytes());
    loss_weights.upload(host_weights, sizeof host_weights), values.fill(0xcd), d_weighted.fill(0xcd);
    WB_TRY_CUDA(cudaDeviceSynchronize());
    const wb_tensor d = tensor(d_weighted.data(), WB_F32, {DeviceCall::kT, DeviceCall::kE}),
                    plain = tensor(call.d_logits.data(), WB_F32, {DeviceCall::kT, DeviceCall::kE});
    ASSERT_EQ(wb_router_losses_weighted(&call.config, &call.inputs, &call.outputs.route, loss_weights.as<float>(), values.as<float>(), &call.stream), WB_OK);
    ASSERT_EQ(wb_router_backward_weighted(&call.config, &call.inputs, &call.outputs.route, call.g.as<float>(), loss_weights.as<float>(), &d, &call.stream),
              WB_OK);
    wb_router_config scaled = call.config;
    scaled.aux_coefficient *= host_weights[0], scaled.z_coefficient *= host_weights[2];
    ASSERT_EQ(wb_router_backward(&scaled, &call.inputs, &call.outputs.route, call.g.as<float>(), 1.0f, &plain, &call.stream), WB_OK);
    double losses[3];
    float got[3];
    std::vector<float> d_got(DeviceCall::kElements), d_want(DeviceCall::kElements);
    call.cuda_stream.synchronize();
    call.losses.download(losses, 24), values.download(got, 12), d_weighted.download(d_got.data(), d_weighted.bytes());
    call.d_logits.download(d_want.data(), d_weighted.bytes());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    EXPECT_NEAR(got[0], 0.5 * losses[0], 1e-5 * losses[0]);
    EXPECT_EQ(got[1], 0.0f);
    EXPECT_NEAR(got[2], 3.0 * losses[2], 1e-5 * losses[2]);
    EXPECT_GT(losses[0], 0);
    for (std::size_t i = 0; i < d_got.size(); ++i) ASSERT_NEAR(d_got[i], d_want[i], 1e-6) << i;
  }
}

TEST(CApiCuda, WhatCannotWorkIsRefusedBeforeALaunch) {
  WB_NEEDS_GPU();
  DeviceCall call;
  const auto refused = [&](const char* text) {
    EXPECT_NE(wb_router_forward(&call.config, &call.inputs, &call.outputs, &call.stream), WB_OK);
    EXPECT_THAT(wb_last_error(), HasSubstr(text));
  };
  auto status = sized<wb_step_status>();
  call.outputs.status = &status;
  refused("outputs.status is host memory, which a call on cuda:0 does not wait to fill");
  call.outputs.status = nullptr;
  call.stream.device_type = WB_CPU;
  refused("stream is on cpu, inputs.logits on cuda:0");
  call.stream.device_type = WB_CUDA_DEVICE;
  call.outputs.route.device_type = WB_CPU;
  refused("logits are on cuda:0, the route is on cpu");
  call.outputs.route.device_type = WB_CUDA_DEVICE;
  call.inputs.logits.data = call.problem.logits.data();
  refused("logits must be memory of cuda:0, got host memory");
  call.inputs.logits.data = call.logits.as<char>() + 2;
  refused("logits must be aligned to its elements of 4 bytes");
  call.inputs.logits.data = call.logits.data();
  call.outputs.route.weights = call.d_weights.data();
  refused("weights must be memory of cuda:0, got host memory");
  call.outputs.route.weights = call.weights.as<float>();
  call.inputs.expert_bias.data = call.problem.bias.data();
  refused("expert_bias must be memory of cuda:0, got host memory");
  call.inputs.expert_bias.data = call.bias.data();
  call.inputs.logits.device_index = 7;
  refused("stream is on cuda:0, inputs.logits on cuda:7");
  call.inputs.logits.device_index = 0;
  call.inputs.logits.stride[0] = DeviceCall::kE, call.inputs.logits.stride[1] = 2;
  refused("the columns of logits must be dense, got stride 2");
  call.inputs.logits.stride[0] = call.inputs.logits.stride[1] = 0;
  call.config.num_groups = 8, call.config.num_kept_groups = 9;
  refused("kept groups must be in [1, G]: kept_groups = 9, G = 8");
  call.config.num_groups = call.config.num_kept_groups = 1;
  std::int16_t first = 0;
  call.ids.download(&first, 2);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(static_cast<std::uint16_t>(first), 0xcdcd) << "a refused call wrote";
  EXPECT_EQ(call.queue(), WB_OK) << wb_last_error();
  call.cuda_stream.synchronize();
}

}  // namespace
}  // namespace waybill::cuda
