// SPDX-License-Identifier: Apache-2.0
// Field cases F01 to F11, the parts that are about the router, through the public API on the GPU: warp kernel and portable kernel.
#include <gmock/gmock.h>

#include <cstdlib>
#include <memory>

#include "cuda/router_harness.h"

namespace waybill::cuda {
namespace {

using ::testing::ElementsAre;
using Ids = std::vector<std::int32_t>;
constexpr float kInf = INFINITY;

RouterProblem make(std::int64_t E, std::int64_t K, ScoreFunction score, bool renormalise, std::vector<float> logits) {
  RouterProblem p;
  p.config.E = E, p.config.K = K, p.config.score = score, p.config.renormalise = renormalise;
  p.T = static_cast<std::int64_t>(logits.size()) / E;
  p.logits = std::move(logits);
  return p;
}

// router_forward() with the CUDA entry of the implementation list (or the portable one).
RouterResult route(const RouterProblem& p, const char* implementation = "cuda") {
  register_router();
  setenv("WB_FORCE", (std::string("router:") + implementation).c_str(), 1);
  const GpuRouter gpu(p);
  gpu.poison();
  const RouterInputs in = gpu.inputs();
  RouterOutputs out = gpu.outputs();
  waybill::router_forward(p.config, in, out, gpu.stream());
  unsetenv("WB_FORCE");
  return gpu.download();
}

// The implementations that take the problem.
std::vector<const char*> implementations(const RouterProblem& p) {
  const GpuRouter gpu(p);
  std::vector<const char*> names;
  if (gpu.refusal(false).empty()) names.push_back("cuda");
  names.push_back("cuda_portable");
  return names;
}

void expect_weights(const RouterResult& r, const std::vector<double>& weights, double tolerance, const char* what) {
  ASSERT_EQ(r.weights.size(), weights.size()) << what;
  for (std::size_t i = 0; i < weights.size(); ++i) EXPECT_NEAR(r.weights[i], weights[i], tolerance) << what << " slot " << i;
}

TEST(RouterCasesCuda, F01_GroupMaskSurvivesNegativeBias) {
  WB_NEEDS_GPU();
  for (const float bias : {-5.0f, 1048576.0f}) {
    for (const float scale : {1.0f, 2.5f}) {
      RouterProblem p = make(8, 2, ScoreFunction::kSigmoid, true, {2, 1, 0, 0, 0, 0, 0, 0});
      p.config.num_groups = 4, p.config.num_kept_groups = 1, p.config.scaling_factor = scale;
      p.bias.assign(8, bias);
      for (const char* name : implementations(p)) {
        const RouterResult r = route(p, name);
        EXPECT_EQ(r.ids, (Ids{0, 1})) << name;
        expect_weights(r, {0.546449 * scale, 0.453551 * scale}, 2e-6, name);
      }
    }
  }
}

TEST(RouterCasesCuda, F02_GroupSettingsAndBothGroupRules) {
  WB_NEEDS_GPU();
  std::vector<float> x(256);
  for (int e = 0; e < 256; ++e) x[static_cast<std::size_t>(e)] = static_cast<float>((37 * e + 11) % 256) / 64.0f - 2.0f;
  RouterProblem e16 = make(256, 8, ScoreFunction::kSigmoid, true, x);
  e16.config.num_groups = 16, e16.config.num_kept_groups = 4;
  for (const char* name : implementations(e16)) {
    const RouterResult r = route(e16, name);
    EXPECT_EQ(r.ids, (Ids{55, 138, 221, 48, 131, 214, 41, 34})) << name;
    expect_weights(r, {0.125935, 0.125693, 0.125447, 0.125199, 0.124948, 0.124694, 0.124437, 0.123648}, 1e-6, name);
  }
  RouterProblem f = make(8, 2, ScoreFunction::kSigmoid, true, {2, -2, 0.5, 0.5, 1, -0.5, -1, -1});
  f.config.num_groups = 4, f.config.num_kept_groups = 2;
  RouterResult r = route(f, "cuda_portable");
  EXPECT_EQ(r.ids, (Ids{4, 2}));
  expect_weights(r, {0.540117, 0.459883}, 1e-6, "top-2 rule");
  f.config.group_score = GroupScore::kTopKPerGroup;
  r = route(f, "cuda_portable");
  EXPECT_EQ(r.ids, (Ids{0, 4}));
  expect_weights(r, {0.546449, 0.453551}, 1e-6, "top-1 rule");
  RouterProblem bad = make(8, 2, ScoreFunction::kSigmoid, true, std::vector<float>(8, 0.0f));
  bad.config.num_groups = 8, bad.config.num_kept_groups = 1;
  EXPECT_THROW(route(bad, "cuda_portable"), Error);
}

TEST(RouterCasesCuda, F03_NonFiniteRowsAndShortRows) {
  WB_NEEDS_GPU();
  std::vector<float> x(5 * 128);
  for (int t = 0; t < 5; ++t) {
    for (int e = 0; e < 128; ++e) x[static_cast<std::size_t>(t * 128 + e)] = t == 1 ? NAN : (t == 2 ? kInf : -static_cast<float>(e) / 8);
  }
  x[3 * 128 + 5] = NAN, x[4 * 128 + 5] = kInf;
  const RouterProblem a = make(128, 8, ScoreFunction::kSoftmaxSelected, true, x);
  for (const char* name : implementations(a)) {
    const RouterResult r = route(a, name);
    const auto row = [&](int t) { return Ids(r.ids.begin() + t * 8, r.ids.begin() + t * 8 + 8); };
    EXPECT_EQ(row(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7})) << name;
    EXPECT_EQ(row(1), Ids(8, -1)) << name;
    EXPECT_EQ(row(2), Ids(8, -1)) << name;
    EXPECT_EQ(row(3), (Ids{0, 1, 2, 3, 4, 6, 7, 8})) << name;
    EXPECT_EQ(row(4), row(3)) << name;
    const double weights[] = {0.191857, 0.169313, 0.149418, 0.131861, 0.116367, 0.090627, 0.079978, 0.07058};
    for (std::size_t k = 0; k < 8; ++k) {
      EXPECT_EQ(r.weights[8 + k], 0.0f);
      EXPECT_NEAR(r.weights[24 + k], weights[k], 1e-6);
    }
    EXPECT_EQ(r.status.num_nonfinite_rows, 4) << name;
    EXPECT_EQ(r.status.num_short_rows, 2) << name;
  }
  const RouterProblem b = make(8, 3, ScoreFunction::kSigmoid, true, {NAN, 1, NAN, NAN, 0, NAN, NAN, NAN});
  RouterProblem c = make(8, 3, ScoreFunction::kSigmoid, false, std::vector<float>(8, 0.0f));
  c.bias = {-kInf, -kInf, 0, -kInf, -kInf, -kInf, -kInf, -kInf};
  for (const char* name : implementations(b)) {
    const RouterResult rb = route(b, name), rc = route(c, name);
    EXPECT_EQ(rb.ids, (Ids{1, 4, -1})) << name;
    expect_weights(rb, {0.593845, 0.406155, 0}, 1e-6, name);
    EXPECT_EQ(rc.ids, (Ids{2, -1, -1})) << name;
    expect_weights(rc, {0.5, 0, 0}, 1e-7, name);
    EXPECT_EQ(rc.status.num_nonfinite_rows, 0);
    EXPECT_EQ(rc.status.num_short_rows, 1);
  }
}

TEST(RouterCasesCuda, F05_ScoresThatUnderflowStillMakeWeights) {
  WB_NEEDS_GPU();
  for (const float x : {-50.0f, -88.0f, -89.0f, -100.0f, -104.0f, -10000.0f}) {
    RouterProblem p = make(8, 8, ScoreFunction::kSigmoid, true, std::vector<float>(8, x));
    p.bias.assign(8, 200.0f);
    for (const char* name : implementations(p)) {
      const RouterResult r = route(p, name);
      EXPECT_EQ(r.ids, (Ids{0, 1, 2, 3, 4, 5, 6, 7})) << name << " x " << x;
      expect_weights(r, std::vector<double>(8, 0.125), 1e-6, name);
    }
  }
  RouterProblem b = make(8, 2, ScoreFunction::kSigmoid, true, {-100, -101, -10000, -10000, -10000, -10000, -10000, -10000});
  b.bias.assign(8, 200.0f);
  for (const char* name : implementations(b)) {
    const RouterResult r = route(b, name);
    EXPECT_EQ(r.ids, (Ids{0, 1})) << name;
    expect_weights(r, {0.731059, 0.268941}, 1e-6, name);
  }
  const RouterProblem c = make(4, 4, ScoreFunction::kSigmoid, true, {2, -1, -1, -3});
  for (const char* name : implementations(c)) expect_weights(route(c, name), {0.600773, 0.183439, 0.183439, 0.032348}, 1e-6, name);
}

TEST(RouterCasesCuda, F06_TiesAreDecidedByTheLowerId) {
  WB_NEEDS_GPU();
  for (const ScoreFunction score : {ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid}) {
    const RouterProblem a = make(8, 2, score, true, std::vector<float>(8, 0.0f));
    const RouterProblem b = make(8, 2, ScoreFunction::kSoftmaxSelected, true, {0, 1, 3, 1, 0, 0, 0, 0});
    const RouterProblem d = make(4, 1, score, true, {-0.0f, 0.0f, -1, -1});
    for (const char* name : implementations(a)) {
      const RouterResult first = route(a, name);
      EXPECT_EQ(first.ids, (Ids{0, 1})) << name;
      for (int i = 0; i < 20; ++i) expect_identical(first, route(a, name), name);
      EXPECT_EQ(route(b, name).ids, (Ids{2, 1})) << name;
      EXPECT_EQ(route(d, name).ids, (Ids{0})) << name;
    }
  }
}

// Losses of given routes, through router_losses().
RouterLosses losses_of(const RouterProblem& p, const std::vector<std::int16_t>& ids, const RouterLossConfig& config) {
  register_router();
  const GpuRouter gpu(p);
  const DeviceBuffer device_ids(ids.size() * 2);
  device_ids.upload(ids.data(), ids.size() * 2);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  RouteView route = gpu.outputs().route;
  route.ids = device_ids.data();
  const RouterInputs in = gpu.inputs();
  return waybill::router_losses(p.config, config, in, route, RouterLossInputs{}, gpu.stream());
}

TEST(RouterCasesCuda, F07_PaddingRowsDoNotCount) {
  WB_NEEDS_GPU();
  std::vector<float> x(8 * 4, 0.0f);
  for (int t = 4; t < 8; ++t) x[static_cast<std::size_t>(t * 4)] = 10;
  RouterProblem p = make(4, 1, ScoreFunction::kSoftmax, false, x);
  p.padding = {0, 0, 0, 0, 1, 1, 1, 1};
  RouterLossConfig config;
  config.aux_coefficient = 1, config.z_coefficient = 1;
  const RouterLosses losses = losses_of(p, {0, 1, 2, 3, 0, 0, 0, 0}, config);
  EXPECT_NEAR(losses.aux, 1.0, 1e-6);
  EXPECT_NEAR(losses.z, 1.921812, 2e-6);
  p.padding.assign(8, 1);
  const RouterLosses none = losses_of(p, {0, 1, 2, 3, 0, 0, 0, 0}, config);
  EXPECT_EQ(none.aux, 0.0);
  EXPECT_EQ(none.z, 0.0);
  const RouterResult r = route(p, "cuda_portable");
  EXPECT_EQ(r.ids, Ids(8, -1));
  EXPECT_EQ(r.counts, Ids(4, 0));
}

TEST(RouterCasesCuda, F08_SequenceLossIsAMeanOverSequences) {
  WB_NEEDS_GPU();
  RouterLossConfig config;
  config.sequence_coefficient = 1, config.sequence_length = 4;
  const RouterProblem one = make(4, 1, ScoreFunction::kSoftmax, false, std::vector<float>(16, 0.0f));
  const RouterProblem two = make(4, 1, ScoreFunction::kSoftmax, false, std::vector<float>(32, 0.0f));
  EXPECT_NEAR(losses_of(one, {0, 1, 2, 3}, config).sequence, 1.0, 1e-6);
  EXPECT_NEAR(losses_of(two, {0, 1, 2, 3, 0, 1, 2, 3}, config).sequence, 1.0, 1e-6);
  std::vector<float> x(32, 0.0f);
  for (int t = 4; t < 6; ++t) {
    for (int e = 1; e < 4; ++e) x[static_cast<std::size_t>(t * 4 + e)] = -10000;
  }
  RouterProblem b = make(4, 1, ScoreFunction::kSoftmax, false, x);
  b.padding = {0, 0, 0, 0, 0, 0, 1, 1};
  EXPECT_NEAR(losses_of(b, {0, 1, 2, 3, 0, 0, 0, 0}, config).sequence, 2.5, 1e-6);
}

TEST(RouterCasesCuda, F04_F10_GradientsOfOneExpertAndOfTheAuxLoss) {
  WB_NEEDS_GPU();
  register_router();
  const auto gradient = [](const RouterProblem& p, float g, const RouterLossConfig& losses) {
    const GpuRouter gpu(p);
    gpu.poison();
    const RouterInputs in = gpu.inputs();
    RouterOutputs out = gpu.outputs();
    waybill::router_forward(p.config, in, out, gpu.stream());
    const std::vector<float> upstream(static_cast<std::size_t>(p.T * p.config.K), g);
    std::vector<float> d(static_cast<std::size_t>(p.T * p.config.E));
    const DeviceBuffer d_weights(upstream.size() * 4), d_logits(d.size() * 4);
    d_weights.upload(upstream.data(), upstream.size() * 4);
    WB_TRY_CUDA(cudaDeviceSynchronize());
    waybill::router_backward(p.config, losses, in, out.route, d_weights.as<float>(), RouterLossInputs{}, 1.0f,
                             TensorView(d_logits.data(), DType::kF32, {p.T, p.config.E}, d_logits.device()), gpu.stream());
    d_logits.download(d.data(), d.size() * 4, gpu.cuda_stream());
    gpu.cuda_stream().synchronize();
    return d;
  };
  EXPECT_THAT(gradient(make(4, 1, ScoreFunction::kSigmoid, true, {1, 0, 0, 0}), 1, {}), ElementsAre(0, 0, 0, 0));
  const std::vector<float> softmax = gradient(make(4, 1, ScoreFunction::kSoftmax, false, {1, 0, 0, 0}), 1, {});
  const double wanted[] = {0.249393, -0.083131, -0.083131, -0.083131};
  for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(softmax[e], wanted[e], 1e-6);
  EXPECT_NEAR(gradient(make(4, 1, ScoreFunction::kSigmoid, false, {1, 0, 0, 0}), 1, {})[0], 0.196612, 1e-6);
  for (const float c : {0.01f, 0.02f}) {
    RouterLossConfig losses;
    losses.aux_coefficient = c;
    const std::vector<float> d = gradient(make(4, 1, ScoreFunction::kSoftmax, false, std::vector<float>(16, 0.0f)), 0, losses);
    for (std::size_t i = 0; i < 16; ++i) EXPECT_NEAR(d[i], (i % 4 == 0 ? 0.1875 : -0.0625) * c, 2e-8);
  }
}

// Aux and z values, and the gradient of W [E, 1] for x = 1, of rows split into parts that share counts and token totals.
struct LayoutResult {
  double aux = 0, z = 0;
  std::vector<double> grad_w;
};
LayoutResult run_layout(const RouterProblem& whole, const RouterLossConfig& losses, const std::vector<std::int64_t>& bounds) {
  register_router();
  const auto E = static_cast<std::size_t>(whole.config.E), K = static_cast<std::size_t>(whole.config.K);
  std::vector<std::unique_ptr<GpuRouter>> parts;
  Ids counts(E, 0);
  for (std::size_t p = 0; p + 1 < bounds.size(); ++p) {
    const auto begin = static_cast<std::size_t>(bounds[p]), end = static_cast<std::size_t>(bounds[p + 1]);
    RouterProblem part = whole;
    part.T = bounds[p + 1] - bounds[p];
    part.logits.assign(whole.logits.begin() + static_cast<std::ptrdiff_t>(begin * E), whole.logits.begin() + static_cast<std::ptrdiff_t>(end * E));
    if (!whole.replay.empty()) {
      part.replay.assign(whole.replay.begin() + static_cast<std::ptrdiff_t>(begin * K), whole.replay.begin() + static_cast<std::ptrdiff_t>(end * K));
    }
    parts.push_back(std::make_unique<GpuRouter>(part));
    parts.back()->poison();
    waybill::router_forward(part.config, parts.back()->inputs(), parts.back()->outputs(), parts.back()->stream());
    const RouterResult result = parts.back()->download();
    for (std::size_t e = 0; e < E; ++e) counts[e] += result.counts[e];
  }
  const DeviceBuffer device_counts(E * 4);
  device_counts.upload(counts.data(), E * 4);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  RouterLossInputs given;
  given.aux_counts = device_counts.as<std::int32_t>();
  given.aux_tokens = given.loss_tokens = static_cast<double>(whole.T);
  LayoutResult total;
  total.grad_w.assign(E, 0.0);
  for (const auto& part : parts) {
    const RouterProblem& p = part->problem();
    const RouteView route = part->outputs().route;
    const RouterLosses values = waybill::router_losses(p.config, losses, part->inputs(), route, given, part->stream());
    total.aux += values.aux, total.z += values.z;
    std::vector<float> d(static_cast<std::size_t>(p.T) * E);
    const DeviceBuffer d_logits(d.size() * 4 + 4);
    waybill::router_backward(p.config, losses, part->inputs(), route, nullptr, given, 1.0f,
                             TensorView(d_logits.data(), DType::kF32, {p.T, p.config.E}, d_logits.device()), part->stream());
    d_logits.download(d.data(), d.size() * 4, part->cuda_stream());
    part->cuda_stream().synchronize();
    for (std::size_t i = 0; i < d.size(); ++i) total.grad_w[i % E] += static_cast<double>(d[i]);
  }
  return total;
}

TEST(RouterCasesCuda, F09_AuxStrengthDoesNotDependOnTheLayout) {
  WB_NEEDS_GPU();
  RouterLossConfig aux;
  aux.aux_coefficient = 1;
  RouterProblem a = make(4, 2, ScoreFunction::kSoftmax, false, std::vector<float>(16 * 4, 0.0f));
  for (std::int32_t t = 0; t < 16; ++t) a.replay.insert(a.replay.end(), {2 * t % 4, (2 * t + 1) % 4});
  EXPECT_NEAR(run_layout(a, aux, {0, 8, 16}).aux, 1.0, 1e-6);
  RouterProblem b = make(4, 1, ScoreFunction::kSoftmax, false, std::vector<float>(8 * 4, 0.0f));
  for (std::size_t t = 0; t < 8; ++t) b.logits[t * 4 + (t < 4 ? 0 : t - 4)] = std::log(7.0f);
  b.replay = {0, 0, 0, 0, 0, 1, 2, 3};
  RouterLossConfig both = aux;
  both.z_coefficient = 0.2f;
  const double z = run_layout(b, both, {0, 8}).z;
  for (const std::vector<std::int64_t>& bounds : {std::vector<std::int64_t>{0, 8}, {0, 4, 8}, {0, 1, 6, 8}, {0, 0, 8}}) {
    const LayoutResult result = run_layout(b, aux, bounds);
    EXPECT_NEAR(result.aux, 1.45, 2e-6);
    const double wanted[] = {0.33, -0.11, -0.11, -0.11};
    for (std::size_t e = 0; e < 4; ++e) EXPECT_NEAR(result.grad_w[e], wanted[e], 2e-6);
    EXPECT_NEAR(run_layout(b, both, bounds).z, z, 1e-6 * z);
  }
}

TEST(RouterCasesCuda, F11_RecomputeCountsNothingTwice) {
  WB_NEEDS_GPU();
  register_router();
  RouterProblem p = make(8, 2, ScoreFunction::kSoftmax, false, std::vector<float>(64 * 8, 0.0f));
  for (std::int64_t t = 0; t < 64; ++t) {
    for (std::int64_t k = 0; k < 2; ++k) p.replay.push_back(static_cast<std::int32_t>((2 * t + k) % 8));
  }
  const GpuRouter gpu(p);
  gpu.poison();
  const RouterInputs in = gpu.inputs();
  RouterOutputs out = gpu.outputs();
  waybill::router_forward(p.config, in, out, gpu.stream());
  out.status = nullptr;  // recompute
  waybill::router_forward(p.config, in, out, gpu.stream());
  const RouterResult r = gpu.download();
  EXPECT_EQ(r.counts, Ids(8, 16));
  EXPECT_EQ(r.offsets.back(), 128);
}

TEST(RouterCudaErrors, WhatTheKernelsCannotTakeIsRefusedWithTheRule) {
  WB_NEEDS_GPU();
  register_router();
  RouterProblem p = make(8, 2, ScoreFunction::kSigmoid, true, std::vector<float>(16, 0.0f));
  const GpuRouter gpu(p);
  RouterInputs in = gpu.inputs();
  const RouterOutputs out = gpu.outputs();
  in.logits.data = static_cast<std::byte*>(in.logits.data) + 2;
  EXPECT_THROW(waybill::router_forward(p.config, in, out, gpu.stream()), Error);
  std::vector<float> host(16);
  in.logits.data = host.data();  // host memory that claims to be on the device
  EXPECT_THROW(waybill::router_forward(p.config, in, out, gpu.stream()), Error);
  RouterProblem wide = make(8196, 2, ScoreFunction::kSigmoid, true, std::vector<float>(8196, 0.0f));
  try {
    const GpuRouter too_wide(wide);
    const RouterInputs wide_in = too_wide.inputs();
    RouterOutputs wide_out = too_wide.outputs();
    waybill::router_forward(wide.config, wide_in, wide_out, too_wide.stream());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("takes up to 8192 experts, got E = 8196"));
  }
}

}  // namespace
}  // namespace waybill::cuda
