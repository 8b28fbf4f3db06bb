// SPDX-License-Identifier: Apache-2.0
// activation_forward(), activation_backward() and the matmuls with an activation on CUDA tensors against the same calls on the CPU.
#include "cuda/gemm_twin.h"
#include "ops/activation/activation_ref.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "waybill/grouped_gemm_activation.h"

namespace waybill::cuda {
namespace {

constexpr Activation kKinds[] = {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared};

ActivationConfig config_of(Activation kind) {
  ActivationConfig config;
  config.kind = kind, config.limit = 0.8f;
  return config;
}

struct Dtypes {
  DType h, a;
};

TEST(ActivationCuda, MatchesTheReferenceForEveryTypeAndWidth) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_activation();
  const CudaStream stream;
  for (const Activation kind : kKinds) {
    for (const Dtypes d : {Dtypes{DType::kBF16, DType::kBF16}, Dtypes{DType::kF32, DType::kF32}, Dtypes{DType::kF32, DType::kBF16}}) {
      for (const std::int64_t F : {1, 24, 37, 256, 1000}) {
        const ActivationConfig config = config_of(kind);
        constexpr std::int64_t S = 45;
        const std::int64_t inner = activation_input_width(config, F);
        const Twin h(d.h, {S, inner}, 1), a(d.a, {S, F}, 2), dh(d.h, {S, inner}, 3), weight(DType::kF32, {S}, 4), d_weight(DType::kF32, {S}, 5);
        const Twin rows(std::vector<std::int32_t>{41});  // of 45
        const std::string what = "kind " + std::to_string(static_cast<int>(kind)) + ", F " + std::to_string(F) + ", " + to_string(d.h) + ", " + to_string(d.a);
        activation_backward(config, h.device(), weight.device().as<float>(), a.device(), dh.device(), d_weight.device().as<float>(), stream_of(stream),
                            rows.device().as<std::int32_t>());
        activation_backward_ref(config, h.host.view().rows(0, 41), weight.host.as<float>(), a.host.view().rows(0, 41), dh.host.view().rows(0, 41),
                                d_weight.host.as<float>());
        stream.synchronize();
        expect_close(dh, "dh, " + what);
        expect_close(d_weight, "d_weight, " + what);
        activation_forward(config, h.device(), nullptr, a.device(), stream_of(stream), rows.device().as<std::int32_t>());
        activation_forward_ref(config, h.host.view().rows(0, 41), nullptr, a.host.view().rows(0, 41));
        stream.synchronize();
        expect_close(a, "a, " + what);
      }
    }
  }
}

TEST(ActivationCuda, Fp32HasTheBitsOfTheCpu) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_activation();
  const CudaStream stream;
  for (const Activation kind : kKinds) {
    const ActivationConfig config = config_of(kind);
    const Twin h(DType::kF32, {33, activation_input_width(config, 320)}, 1), a(DType::kF32, {33, 320}, 2), weight(DType::kF32, {33}, 3);
    activation_forward(config, h.device(), weight.device().as<float>(), a.device(), stream_of(stream));
    activation_forward(config, h.host, weight.host.as<float>(), a.host);
    stream.synchronize();
    const std::vector<float> got = a.download();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], a.host_at(static_cast<std::int64_t>(i))) << "kind " << static_cast<int>(kind) << ", element " << i;
  }
}

TEST(ActivationCuda, TensorsOfAnotherDeviceAreRefused) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_activation();
  const CudaStream stream;
  const Twin h(DType::kBF16, {4, 16}, 1), a(DType::kBF16, {4, 8}, 2);
  try {
    activation_forward({}, h.host, nullptr, a.device(), stream_of(stream));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "activation: h is not on cuda:0: bf16 [4, 16] on cpu");
  }
}

// One expert layer's calls on both sides.
void expect_layer_matches(Activation kind, DType dtype, WeightLayout layout, bool keep_h, bool listed) {
  const ActivationConfig config = config_of(kind);
  constexpr std::int64_t L = 4, C = 72, F = 40, S = 130, T = 60;
  const std::int64_t inner = activation_input_width(config, F);
  const Twin x(dtype, {listed ? T : S, C}, 1), dy(dtype, {listed ? T : S, C}, 2), weight(DType::kF32, {S}, 3), d_weight(DType::kF32, {S}, 4);
  const Twin w1 = layout == WeightLayout::kLNC ? Twin(dtype, {L, inner, C}, 5) : Twin(dtype, {L, C, inner}, 5);
  const Twin w2 = layout == WeightLayout::kLNC ? Twin(dtype, {L, F, C}, 6) : Twin(dtype, {L, C, F}, 6);
  const Twin h(dtype, {S, inner}, 7), out(dtype, {S, F}, 8), dh(dtype, {S, inner}, 9), da(dtype, {S, F}, 10), bias(DType::kF32, {L, inner}, 11);
  const Twin offsets(std::vector<std::int32_t>{0, 31, 31, 100, 121});
  std::vector<std::int32_t> rows(static_cast<std::size_t>(S));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = i % 9 == 4 ? -1 : static_cast<std::int32_t>(i * 7 % static_cast<std::size_t>(T));
  const Twin list(rows);
  const CudaStream stream;
  const auto args = [&](bool on_device) {
    const auto of = [&](const Twin& twin) { return on_device ? twin.device() : twin.host.view(); };
    GroupedGemmActivationArgs forward;
    forward.product.a = of(x), forward.product.weights = of(w1), forward.product.offsets = of(offsets), forward.product.layout = layout;
    forward.product.bias = of(bias), forward.activation = config, forward.out = of(out), forward.weight = of(weight);
    if (keep_h) forward.product.y = of(h);
    if (listed) forward.product.a_rows = of(list);
    GroupedGemmActivationBackwardArgs backward;
    backward.product.a = of(dy), backward.product.weights = of(w2), backward.product.offsets = of(offsets), backward.product.layout = layout;
    backward.activation = config, backward.h = of(h), backward.dh = of(dh), backward.weight = of(weight), backward.d_weight = of(d_weight);
    if (keep_h) backward.product.y = of(da);
    if (listed) backward.product.a_rows = of(list);
    return std::pair(forward, backward);
  };
  const auto [device_forward, device_backward] = args(true);
  const auto [host_forward, host_backward] = args(false);
  grouped_gemm_activation(device_forward, stream_of(stream));
  grouped_gemm_activation(host_forward);
  stream.synchronize();
  const std::string what = "kind " + std::to_string(static_cast<int>(kind)) + ", " + to_string(dtype) + (layout == WeightLayout::kLNC ? ", LNC" : ", LCN") +
                           (keep_h ? ", h kept" : "") + (listed ? ", listed" : "");
  if (keep_h) expect_near(h, 0.01f, "h, " + what);
  expect_near(out, 0.03f, "out, " + what);
  h.upload();  // both sides go on from the same h
  grouped_gemm_activation_backward(device_backward, stream_of(stream));
  grouped_gemm_activation_backward(host_backward);
  stream.synchronize();
  expect_near(dh, 0.03f, "dh, " + what);
  expect_near(d_weight, 0.03f, "d_weight, " + what);
}

TEST(GroupedGemmActivationApiCuda, MatchesTheCpu) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_activation(), register_gemm();
  for (const Activation kind : kKinds) {
    for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
      for (const bool listed : {false, true}) {
        expect_layer_matches(kind, DType::kBF16, layout, true, listed);
        expect_layer_matches(kind, DType::kF32, layout, true, listed);  // composed
        int major = 0;
        WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
        if (major == 9) expect_layer_matches(kind, DType::kBF16, layout, false, listed);
      }
    }
  }
}

TEST(GroupedGemmActivationApiCuda, WithoutRoomForWhatLiesBetweenOnlyTheFusedKernelRuns) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_activation(), register_gemm();
  const CudaStream stream;
  const Twin x(DType::kF32, {8, 16}, 1), w(DType::kF32, {1, 32, 16}, 2), out(DType::kF32, {8, 16}, 3), offsets(std::vector<std::int32_t>{0, 8});
  GroupedGemmActivationArgs args;
  args.product.a = x.device(), args.product.weights = w.device(), args.product.offsets = offsets.device(), args.out = out.device();
  try {
    grouped_gemm_activation(args, stream_of(stream));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("takes bf16 tensors, got f32 [8, 16]"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("composed: needs product.y"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace waybill::cuda
