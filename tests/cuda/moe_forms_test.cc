// SPDX-License-Identifier: Apache-2.0
// Forms of a step that differ in speed and memory alone: a combine beside dW1, blocks of columns, the shared expert beside dispatch; and first steps, whose
// kernels are loaded before.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

class MoeCudaForms : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeCudaForms, ::testing::Values(1, 2, 8), ::testing::PrintToStringParamName());

// Steps of a form against the reference's, the second of them without tokens: to the bit.
void expect_equal_steps(const MoeConfig& c, int P, std::int64_t tokens, GpuMoe& reference, GpuMoe& form, const std::string& what) {
  for (std::uint64_t round = 0; round < 3; ++round) {
    const mt::Batch batch = bf16_batch(c, even(P, round == 1 ? 0 : tokens), 9 + round);
    reference.upload(batch), reference.zero_gradients(), reference.step();
    form.upload(batch), form.zero_gradients(), form.step();
    ASSERT_EQ(form.first_error(), "") << what;
    const mt::Result want = reference.result();
    expect_same_bits(want, form.result(), fmt::format("{}, round {}", what, round));
  }
}

// Replays of one graph with routes that change.
void expect_equal_replays(const MoeConfig& c, int P, std::int64_t tokens, GpuMoe& reference, GpuMoe& form, const std::string& what) {
  form.capture();
  for (std::uint64_t round = 0; round < 8; ++round) {
    const mt::Batch batch = bf16_batch(c, even(P, tokens), 30 + round);
    reference.upload(batch), reference.step();
    form.upload_rows(batch), form.replay();
    const mt::Result want = reference.result();
    expect_same_bits(want, form.result(), fmt::format("{}, replay {}", what, round));
  }
}

// The combine of dx beside the gradient of the first weights: another order of launches, the same sums.
void expect_bits_beside(int P, const std::vector<int>& devices) {
  using Rows = DeviceMoePolicy::Rows;
  struct Variant {
    std::int64_t latent, shared_F;
    DType out;
    Rows gradient;
    bool exact;
  };
  for (const Variant v : {Variant{0, 0, DType::kBF16, Rows::kPermute, false}, Variant{0, 0, DType::kBF16, Rows::kGather, true},
                          Variant{0, 64, DType::kBF16, Rows::kPermute, true}, Variant{96, 64, DType::kBF16, Rows::kPermute, false},
                          Variant{0, 64, DType::kF32, Rows::kGather, false}}) {
    MoeConfig c = gpu_config(16, 4, 120, 328, 96);
    c.latent = v.latent, c.shared_F = v.shared_F;
    const mt::Weights<float> w = bf16_weights(c, 3);
    MoeGpuOptions options;
    options.devices = devices, options.out_dtype = v.out, options.layer.exact_sizes = v.exact;
    GpuMoe reference(c, P, w, options);
    for (const int sms : {v.exact ? 4 : 32, 132}) {
      options.layer.policy = {Rows::kAuto, v.gradient, sms, /*whole_x=*/sms == 4};
      GpuMoe gpu(c, P, w, options);
      const std::string what = fmt::format("P {}, latent {}, shared {}, {} SMs", P, v.latent, v.shared_F, sms);
      expect_equal_steps(c, P, 120, reference, gpu, what);
      if (::testing::Test::HasFatalFailure()) return;
      if (!v.exact) expect_equal_replays(c, P, 120, reference, gpu, what);
    }
  }
}

TEST_P(MoeCudaForms, ACombineBesideTheFirstWeightsGradientHasTheSameBits) {
  WB_NEEDS_GPU();
  expect_bits_beside(GetParam(), {0});
}

TEST(MoeTwoGpus, ACombineBesideTheFirstWeightsGradientHasTheSameBits) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  expect_bits_beside(2, {0, 1});
}

// Results of the second matmul and gradients of rows in blocks of columns.
void expect_bits_in_blocks(int P, const std::vector<int>& devices) {
  struct Variant {
    std::int64_t latent, shared_F;
    DType out, gradient;
    bool exact, resend;
  };
  for (const Variant v : {Variant{0, 0, DType::kBF16, DType::kBF16, true, true}, Variant{0, 64, DType::kBF16, DType::kF32, false, true},
                          Variant{200, 64, DType::kF32, DType::kF32, true, false}, Variant{0, 0, DType::kF32, DType::kBF16, false, false}}) {
    MoeConfig c = gpu_config(16, 4, 150, 456, 96);
    c.latent = v.latent, c.shared_F = v.shared_F;
    const mt::Weights<float> w = bf16_weights(c, 3);
    MoeGpuOptions options;
    options.devices = devices, options.out_dtype = v.out, options.gradient_dtype = v.gradient;
    options.layer.exact_sizes = v.exact, options.layer.resend_rows = v.resend;
    options.accumulate = v.gradient == DType::kF32 && v.resend;
    GpuMoe reference(c, P, w, options);
    for (const auto& [blocks, rows] : {std::pair(v.exact ? 2 : 3, DeviceMoePolicy::Rows::kPermute), std::pair(100, DeviceMoePolicy::Rows::kPermute),
                                       std::pair(2, DeviceMoePolicy::Rows::kAuto)}) {  // few rows: through the list
      options.layer.column_blocks = blocks, options.layer.policy.gradient = rows;
      GpuMoe gpu(c, P, w, options);
      expect_equal_steps(c, P, 150, reference, gpu, fmt::format("P {}, latent {}, shared {}, {} blocks", P, v.latent, v.shared_F, blocks));
      if (::testing::Test::HasFatalFailure()) return;
    }
    options.layer.policy.gradient = DeviceMoePolicy::Rows::kAuto;
  }
}

TEST_P(MoeCudaForms, BlocksOfColumnsHaveTheSameBits) {
  WB_NEEDS_GPU();
  expect_bits_in_blocks(GetParam(), {0});
}

TEST(MoeTwoGpus, BlocksOfColumnsHaveTheSameBits) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  expect_bits_in_blocks(2, {0, 1});
}

// What the shared expert computes without a routed result, while rows travel: another stream, the same sums.
void expect_bits_beside_dispatch(int P, const std::vector<int>& devices) {
  using Rows = DeviceMoePolicy::Rows;
  struct Variant {
    std::int64_t latent;
    DType out, gradient;
    Recompute recompute;
    Rows rows;
    bool exact, resend;
    int combine_sms;
  };
  const Variant variants[] = {
      {0, DType::kBF16, DType::kBF16, Recompute::kNone, Rows::kAuto, false, false, 0},
      {96, DType::kF32, DType::kF32, Recompute::kActivation, Rows::kGather, false, false, 0},
      {0, DType::kBF16, DType::kF32, Recompute::kLayer, Rows::kAuto, false, true, 0},
      {0, DType::kF32, DType::kBF16, Recompute::kNone, Rows::kPermute, true, true, 0},
      {96, DType::kBF16, DType::kBF16, Recompute::kNone, Rows::kAuto, false, false, 32},
  };
  for (const Variant& v : variants) {
    MoeConfig c = gpu_config(16, 4, 120, 328, 96);
    c.latent = v.latent, c.shared_F = 200, c.recompute = v.recompute, c.overlap_shared = false;
    const mt::Weights<float> w = bf16_weights(c, 3);
    MoeGpuOptions options;
    options.devices = devices, options.out_dtype = v.out, options.gradient_dtype = v.gradient, options.accumulate = v.gradient == DType::kF32;
    options.layer.policy.gradient = v.rows, options.layer.policy.combine_sms = v.combine_sms;
    options.layer.exact_sizes = v.exact, options.layer.resend_rows = v.resend;
    GpuMoe reference(c, P, w, options);
    c.overlap_shared = true;
    bool was_beside = false;  // the shared expert's work was queued on another stream than the layer's
    const CudaStream* main = nullptr;
    options.layer.on_phase = [&](Phase phase, cudaStream_t stream) { was_beside |= phase == Phase::kShared && main != nullptr && stream != main->get(); };
    GpuMoe gpu(c, P, w, options);
    if (devices.size() == 1) main = &gpu.stream();
    const std::string what = fmt::format("P {}, latent {}, recompute {}", P, v.latent, static_cast<int>(v.recompute));
    expect_equal_steps(c, P, 120, reference, gpu, what);
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_EQ(was_beside, devices.size() == 1) << what;
    if (v.exact) continue;
    gpu.zero_gradients(), reference.zero_gradients();
    expect_equal_replays(c, P, 120, reference, gpu, what);
  }
}

TEST_P(MoeCudaForms, TheSharedExpertBesideDispatchHasTheSameBits) {
  WB_NEEDS_GPU();
  expect_bits_beside_dispatch(GetParam(), {0});
}

TEST(MoeTwoGpus, TheSharedExpertBesideDispatchHasTheSameBits) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  expect_bits_beside_dispatch(2, {0, 1});
}

// One thread is late before every phase, so that the other one loads its kernels and makes its scratch while its GPU waits for the late one: nothing that it
// holds meanwhile may be what the late one needs, such as a lock. Kernels of a recipe that runs for the first time in the process are the hard case; each
// thread leads once.
TEST(MoeTwoGpus, AFirstStepUnderAnyRecipeDoesNotHoldUpALateThread) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const Recipe recipe : {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4, Recipe::kBF16}) {
    for (const int late : {0, 1}) {
      MoeConfig c = gpu_config(16, 4, 200, 512, 320);
      c.recipe.kind = recipe;
      MoeGpuOptions options;
      options.devices = {0, 1}, options.timeout = std::chrono::milliseconds(2000);
      const auto is_first = std::make_shared<std::atomic<bool>>(true);
      options.layer.on_phase = [late, is_first](Phase, cudaStream_t) {
        int device = 0;
        WB_TRY_CUDA(cudaGetDevice(&device));
        if (device == late && *is_first) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      };
      GpuMoe gpu(c, 2, bf16_weights(c, 41), options);
      gpu.upload(bf16_batch(c, {200, 200}, 1)), gpu.zero_gradients(), gpu.step();
      ASSERT_EQ(gpu.first_error(), "") << to_string(recipe) << ", late " << late;
      *is_first = false;
      const mt::Result first = gpu.result();
      EXPECT_TRUE(first.valid[0] && first.valid[1]) << to_string(recipe);
      gpu.upload(bf16_batch(c, {200, 200}, 1)), gpu.zero_gradients(), gpu.step();
      expect_same_bits(first, gpu.result(), fmt::format("{}, late {}", to_string(recipe), late));
    }
  }
}

}  // namespace
}  // namespace waybill::cuda
