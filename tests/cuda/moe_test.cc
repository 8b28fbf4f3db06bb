// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs against the layer on the CPU: outputs, every gradient, budgets, captured graphs.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

const bool kLazyLoading = setenv("CUDA_MODULE_LOADING", "LAZY", 1) == 0;  // as device_exchange.h says of a thread a GPU

class MoeCuda : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeCuda, ::testing::Values(1, 2, 4, 8), ::testing::PrintToStringParamName());

TEST_P(MoeCuda, AgreesWithTheLayerOnTheCpu) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  check(gpu_config(16, 4, 100), even(P, 100), {}, "even");
  check(gpu_config(16, 4, 100), even(P, 97), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, "bf16 results");
  check(gpu_config(16, 4, 100), even(P, 100), {.accumulate = true}, "accumulated");
  check(gpu_config(16, 16, 40), even(P, 40), {}, "K = E");
  check(gpu_config(8, 1, 130), even(P, 130), {}, "K = 1");
  check(gpu_config(128, 3, 20), even(P, 20), {}, "empty experts");
}

TEST_P(MoeCuda, AgreesWithTheLayerOnTheCpuAtRaggedTokens) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  std::vector<std::int64_t> tokens;
  for (int p = 0; p < P; ++p) tokens.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : 75 + p));
  check(gpu_config(16, 4, 100), tokens, {}, "ragged");
  check(gpu_config(16, 4, 100), even(P, 0), {}, "no tokens at all");
}

TEST_P(MoeCuda, AgreesWithTheLayerOnTheCpuWithLargerMatrices) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  check(gpu_config(32, 8, 256, 512, 320), even(P, 512 / P < 256 ? 512 / P : 256), {}, "larger");
}

TEST_P(MoeCuda, EveryScoreAndActivation) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const bool renormalise : {false, true}) {
      MoeConfig c = gpu_config(16, 4, 50);
      c.router.score = score, c.router.renormalise = renormalise, c.router.scaling_factor = 1.5f;
      c.activation.kind = score == ScoreFunction::kSigmoid ? Activation::kClampedSwiGLU : (renormalise ? Activation::kReluSquared : Activation::kSwiGLU);
      check(c, even(P, 50), {}, fmt::format("score {}, renormalise {}", static_cast<int>(score), renormalise), 30 + static_cast<std::uint64_t>(score));
    }
  }
}

TEST_P(MoeCuda, EveryRowPolicyAndRecomputeModeHasTheSameBits) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 4, 100);
  const mt::Weights<float> w = bf16_weights(c, 3);
  const mt::Batch batch = bf16_batch(c, even(P, 100), 4);
  GpuMoe reference(c, P, w, {});
  reference.upload(batch), reference.step();
  const mt::Result want = reference.result();
  using Rows = DeviceMoePolicy::Rows;
  for (const Rows forward : {Rows::kGather, Rows::kPermute}) {
    for (const Rows gradient : {Rows::kGather, Rows::kPermute}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
        MoeConfig other = c;
        other.recompute = recompute;
        for (const bool resend : {false, true}) {
          MoeGpuOptions options;
          options.layer.policy.forward = forward, options.layer.policy.gradient = gradient, options.layer.resend_rows = resend,
          options.layer.exact_sizes = resend != (forward == gradient);
          GpuMoe gpu(other, P, w, options);
          for (int repeat = 0; repeat < 2; ++repeat) {
            gpu.upload(batch), gpu.step();
            expect_same_bits(want, gpu.result(),
                             fmt::format("forward {}, gradient {}, recompute {}, rows sent again {}, step {}", static_cast<int>(forward),
                                         static_cast<int>(gradient), static_cast<int>(recompute), resend, repeat));
          }
        }
      }
    }
  }
}

TEST_P(MoeCuda, SharedExpertsAndLatentWidths) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (int features = 1; features < 4; ++features) {
    MoeConfig c = gpu_config(16, 4, 60);
    if ((features & 1) != 0) c.shared_F = 40;
    if ((features & 2) != 0) c.latent = 32;
    const std::string what = fmt::format("shared {}, latent {}", c.shared_F, c.latent);
    check(c, even(P, 60), {}, what);
    check(c, even(P, 57), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, what + ", bf16 results", 8, true);
    check(c, even(P, 60), {.accumulate = true}, what + ", accumulated");
    if (P > 1) {
      std::vector<std::int64_t> ragged = even(P, 60);
      ragged[1] = 0, ragged[0] = 1;
      check(c, ragged, {}, what + ", ragged");
    }
    const mt::Weights<float> w = bf16_weights(c, 3);
    const mt::Batch batch = bf16_batch(c, even(P, 60), 4);
    GpuMoe reference(c, P, w, {});
    reference.upload(batch), reference.step();
    const mt::Result want = reference.result();
    for (const Recompute recompute : {Recompute::kActivation, Recompute::kLayer}) {
      MoeConfig other = c;
      other.recompute = recompute;
      GpuMoe gpu(other, P, w, {});
      gpu.upload(batch), gpu.step();
      expect_same_bits(want, gpu.result(), what + fmt::format(", recompute {}", static_cast<int>(recompute)));
    }
  }
}

TEST_P(MoeCuda, LossesAndTheirGradients) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const bool masked : {false, true}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      const std::string what = fmt::format("score {}, masked {}", static_cast<int>(score), masked);
      MoeConfig c = gpu_config(16, 4, 64);
      c.router.score = score;
      c.aux_coefficient = 2, c.sequence_coefficient = 1, c.sequence_length = 16, c.z_coefficient = 0.3f;
      check(c, even(P, 64), {}, what + ", aux, sequence, z", 11, masked);
      c.aux_coefficient = 0, c.global_coefficient = 3, c.sequence_coefficient = 0, c.aux_counts = AuxCounts::kUnbiased, c.bias_update_rate = 1e-3f;
      check(c, even(P, 64), {}, what + ", global of unbiased counts", 12, masked);
    }
  }
}

TEST_P(MoeCuda, CountsOfAllRanks) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 64);
  c.bias_update_rate = 1e-3f;
  const mt::Weights<float> w = bf16_weights(c, 3, true);
  GpuMoe gpu(c, P, w, {});
  for (std::uint64_t round = 0; round < 4; ++round) {
    gpu.upload(bf16_batch(c, even(P, 64), round)), gpu.step();
    std::vector<std::int32_t> want(16, 0);
    for (const std::int32_t id : gpu.result().ids) ++want[static_cast<std::size_t>(id)];
    for (int p = 0; p < P; ++p) EXPECT_EQ(gpu.total_counts(p), want) << "rank " << p << ", round " << round;
  }
}

TEST_P(MoeCuda, PaddingTokensTakeNoPart) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 4, 64);
  const mt::Weights<float> w = bf16_weights(c, 8);
  mt::Batch batch = bf16_batch(c, even(P, 64), 9);
  batch.mask.resize(static_cast<std::size_t>(batch.T()));
  for (std::size_t t = 0; t < batch.mask.size(); ++t) batch.mask[t] = t % 3 == 1 ? 1 : 0;
  GpuMoe gpu(c, P, w, {});
  gpu.upload(batch), gpu.step();
  mt::Result got = gpu.result();
  expect_agreement(c, w, batch, got, "masked");
  for (std::size_t t = 0; t < batch.mask.size(); ++t) {
    for (std::size_t i = t * 64; i < (t + 1) * 64 && batch.mask[t] != 0; ++i) ASSERT_EQ(got.out[i], 0.0f) << "padding token " << t;
  }
}

TEST_P(MoeCuda, AllTokensToOneExpert) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(8, 1, 90);
  const mt::Weights<float> w = bf16_weights(c, 12);
  mt::Batch batch = bf16_batch(c, even(P, 90), 13);
  batch.replay.assign(static_cast<std::size_t>(batch.T()), 5);
  GpuMoe gpu(c, P, w, {});
  gpu.upload(batch), gpu.step();
  mt::Result got = gpu.result();
  EXPECT_EQ(got.ids, batch.replay);
  expect_agreement(c, w, batch, got, "one expert");
}

// h, a and dW of an expert depend on its rows and their order alone.
TEST_P(MoeCuda, WeightGradientsHaveTheBitsOfOneRank) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 2, 96);
  const mt::Weights<float> w = bf16_weights(c, 21);
  const mt::Batch whole = bf16_batch(c, {96}, 22);
  mt::Batch split = whole;
  split.tokens = even(P, 96 / P);
  GpuMoe one(c, 1, w, {}), many(c, P, w, {});
  one.upload(whole), one.step(), many.upload(split), many.step();
  const mt::Result want = one.result(), got = many.result();
  EXPECT_EQ(want.ids, got.ids);
  EXPECT_TRUE(mt::same_bits(want.gradients.w1, got.gradients.w1));
  EXPECT_TRUE(mt::same_bits(want.gradients.w2, got.gradients.w2));
}

TEST_P(MoeCuda, ACapturedStepHasTheBitsOfAnEagerOneOverManyRoutes) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 60);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 4;
  const mt::Weights<float> w = bf16_weights(c, 40);
  GpuMoe eager(c, P, w, {}), captured(c, P, w, {});
  std::vector<mt::Batch> batches;
  std::vector<mt::Result> want;
  for (std::uint64_t b = 0; b < 8; ++b) {
    batches.push_back(bf16_batch(c, even(P, 60), 50 + 2 * b));
    eager.upload(batches.back()), eager.step();
    want.push_back(eager.result());
    EXPECT_EQ(b > 0 && want[b].ids == want[0].ids, false);
  }
  captured.upload(batches[0]), captured.step();
  captured.capture();
  const int rounds = P <= 2 ? 1000 : 200;
  for (int round = 0; round < rounds; ++round) {
    const auto b = static_cast<std::size_t>(round * 5 % 8);
    captured.upload_rows(batches[b]);
    captured.replay();
    if (round < 16 || round % 10 == 0) expect_same_bits(want[b], captured.result(), fmt::format("replay {}", round));
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(captured.report(0).forwards, static_cast<std::uint64_t>(rounds) + 1);
}

void expect_overflow_is_harmless(int P, bool everything) {
  MoeConfig c = gpu_config(16, 1, 16);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1;  // 16 slots a rank
  if (everything) c.shared_F = 24, c.latent = 32, c.aux_coefficient = 1, c.z_coefficient = 1;
  const mt::Weights<float> w = bf16_weights(c, 60);
  const auto to_first_rank = [&](std::int64_t slots) {
    mt::Batch batch = bf16_batch(c, even(P, 16), 61);
    batch.replay.assign(static_cast<std::size_t>(batch.T()), 15);
    for (std::int64_t t = 0; t < batch.T(); ++t) {
      const std::int64_t rank = t / 16;  // the others stay at home
      batch.replay[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(rank * (16 / P));
    }
    for (std::int64_t extra = 0; extra < slots - 16; ++extra) batch.replay[static_cast<std::size_t>(16 + extra)] = 0;
    return batch;
  };
  GpuMoe gpu(c, P, w, {.accumulate = true});
  mt::Batch full = to_first_rank(16), over = to_first_rank(17);
  gpu.upload(full), gpu.zero_gradients(), gpu.step();
  mt::Result got = gpu.result();
  EXPECT_EQ(got.slots[0], 16);
  expect_agreement(c, w, full, got, "exactly full");
  gpu.upload(over), gpu.step();
  mt::Result after = gpu.result();
  for (int p = 0; p < P; ++p) {
    EXPECT_EQ(gpu.report(p).valid, 0) << "rank " << p;
    EXPECT_EQ(gpu.report(p).max_slot_demand, 17) << "rank " << p;
  }
  EXPECT_TRUE(gpu.status(0).overflowed());
  EXPECT_EQ(gpu.status(0).slot_demand, 17);
  EXPECT_EQ(gpu.status(0).slot_capacity, 16);
  EXPECT_TRUE(std::all_of(after.out.begin(), after.out.end(), [](float v) { return v == 0.0f; }));
  EXPECT_TRUE(std::all_of(after.dx.begin(), after.dx.end(), [](float v) { return v == 0.0f; }));
  EXPECT_TRUE(mt::same_bits(after.gradients, got.gradients)) << "an invalid step left its mark on the gradients";
  gpu.clear_status();
  gpu.upload(full), gpu.zero_gradients(), gpu.step();
  mt::Result again = gpu.result();
  expect_same_bits(got, again, "after an overflow");
}

TEST_P(MoeCuda, AnExceededBudgetChangesNothing) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  if (P == 1) GTEST_SKIP() << "one rank receives what it brings";
  for (const bool everything : {false, true}) expect_overflow_is_harmless(P, everything);
}

TEST_P(MoeCuda, EvaluationLeavesNothingForBackward) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 4, 30);
  const mt::Weights<float> w = bf16_weights(c, 70);
  const mt::Batch batch = bf16_batch(c, even(P, 30), 71);
  GpuMoe gpu(c, P, w, {});
  gpu.upload(batch), gpu.step();
  const mt::Result want = gpu.result();
  gpu.upload(batch), gpu.evaluate();
  EXPECT_TRUE(mt::same_bits(gpu.result().out, want.out));
  EXPECT_THROW(gpu.backward(0, gpu.stream()), Error);
}

TEST(MoeTwoGpus, AgreesWithTheLayerOnTheCpu) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const int P : {2, 4}) {
    MoeGpuOptions options;
    options.devices = {0, 1};
    check(gpu_config(16, 4, 100), even(P, 100), options, "two GPUs");
    check(gpu_config(32, 8, 256, 512, 320), even(P, 128), options, "two GPUs, larger");
  }
}

// Scratch of a stream is allocated in its first step and waits for the stream, which waits for the other rank: that must not keep the other GPU's thread
// from queueing its part.
TEST(MoeTwoGpus, AFirstStepDoesNotHoldUpTheOtherGpusThread) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  const MoeConfig c = gpu_config(32, 8, 512, 1024, 640);
  MoeGpuOptions options;
  options.devices = {0, 1};
  GpuMoe gpu(c, 2, bf16_weights(c, 41), options);
  gpu.upload(bf16_batch(c, {512, 512}, 1));
  std::thread late([&] {
    const DeviceGuard guard(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    gpu.forward(1, gpu.stream(1)), gpu.backward(1, gpu.stream(1));
  });
  {
    const DeviceGuard guard(0);
    gpu.forward(0, gpu.stream(0)), gpu.backward(0, gpu.stream(0));
  }
  late.join();
  for (const std::size_t d : {0, 1}) gpu.stream(d).synchronize();
  EXPECT_EQ(gpu.first_error(), "");
  // The counter of waits: rank 0 waited for the late rank 1, which found rank 0's counts there.
  EXPECT_GE(gpu.report(0).wait_ns[1], 100'000'000u);
  EXPECT_LT(gpu.report(1).wait_ns[0], 100'000'000u);
}

// A rank without tokens comes to the first exchange at once, while the other still makes what its gate needs.
TEST(MoeTwoGpus, ARankWithoutTokensDoesNotHoldUpTheFirstStep) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  const MoeConfig c = gpu_config(16, 4, 200);
  MoeGpuOptions options;
  options.devices = {0, 1};
  check(c, {0, 200}, options, "no tokens on rank 0");
  check(c, {200, 0}, options, "no tokens on rank 1");
}

TEST(MoeTwoGpus, CapturedStepsHaveTheBitsOfOneGpu) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  MoeConfig c = gpu_config(16, 4, 60);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 2;
  const mt::Weights<float> w = bf16_weights(c, 40);
  MoeGpuOptions options;
  options.devices = {0, 1};
  GpuMoe one(c, 2, w, {}), two(c, 2, w, options);
  const mt::Batch first = bf16_batch(c, {60, 60}, 1);
  two.upload(first), two.step(), two.capture();
  for (std::uint64_t round = 0; round < 50; ++round) {
    const mt::Batch batch = bf16_batch(c, {60, 60}, 2 * round);
    one.upload(batch), one.step();
    two.upload_rows(batch), two.replay();
    expect_same_bits(one.result(), two.result(), fmt::format("round {}", round));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(MoeCudaInput, WhatTheLayerDoesNotDoIsRefusedByName) {
  const auto refusal = [](const std::function<void(MoeConfig&)>& change) {
    MoeConfig c = gpu_config(16, 4, 30);
    change(c);
    try {
      (void)DeviceMoeLayer::arena_bytes(c, 2);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal([](MoeConfig&) {}), "");
  EXPECT_THAT(refusal([](MoeConfig& c) { c.recipe.kind = Recipe::kF32; }), ::testing::HasSubstr("recipes other than bf16, fp8, mxfp8 and nvfp4"));
  EXPECT_THAT(refusal([](MoeConfig& c) { c.T_max = 0; }), ::testing::HasSubstr("T_max = 0"));
  EXPECT_THAT(refusal([](MoeConfig& c) { c.H = 60; }), ::testing::HasSubstr("H = 60"));
  EXPECT_THAT(refusal([](MoeConfig& c) { c.F = 20; }), ::testing::HasSubstr("F = 20"));
  EXPECT_THAT(refusal([](MoeConfig& c) { c.F = 24, c.recipe.kind = Recipe::kFP8; }), ::testing::HasSubstr("multiples of 16"));
}

}  // namespace
}  // namespace waybill::cuda
