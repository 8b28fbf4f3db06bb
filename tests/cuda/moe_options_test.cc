// SPDX-License-Identifier: Apache-2.0
// What a layer may have beside the plain one, against the layer on the CPU: expert biases, several losses at once, the capacity mode, experts in slices
// of F, several groups in a process.
#include <gmock/gmock.h>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

class MoeCudaOptions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeCudaOptions, ::testing::Values(1, 2, 4, 8), ::testing::PrintToStringParamName());

std::vector<std::int64_t> ragged(int P, std::int64_t T) {
  std::vector<std::int64_t> tokens;
  for (int p = 0; p < P; ++p) tokens.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : T - p));
  return tokens;
}

// Rows of -1 alone, rows that end in -1, all else as a seeded choice of distinct ids; `hot`: every row names expert 0.
mt::Batch hard_batch(const MoeConfig& c, const std::vector<std::int64_t>& tokens, std::uint64_t seed, bool hot) {
  mt::Batch batch = bf16_batch(c, tokens, seed);
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    for (std::int64_t k = 0; k < c.K; ++k) {
      const std::int64_t id = hot && k == 0 ? 0 : (hot ? 1 + (t + k) % (c.E - 1) : (t * 7 + k * (1 + 2 * (t % 2))) % c.E);
      batch.replay.push_back(t % 9 == 4 || (t % 5 == 3 && k + 1 == c.K) ? -1 : static_cast<std::int32_t>(id));
    }
  }
  return batch;
}

// Eager against the CPU on given routes, and captured against eager to the bit.
void check_routes(const MoeConfig& c, const mt::Batch& batch, const MoeGpuOptions& options, const std::string& what) {
  const int P = static_cast<int>(batch.tokens.size());
  const mt::Weights<float> w = bf16_weights(c, 5);
  GpuMoe gpu(c, P, w, options);
  gpu.upload(batch), gpu.zero_gradients(), gpu.step();
  ASSERT_EQ(gpu.first_error(), "") << what;
  mt::Result got = gpu.result();
  expect_agreement(c, w, batch, got, what);
  gpu.capture();
  gpu.upload(batch), gpu.zero_gradients(), gpu.replay();
  expect_same_bits(got, gpu.result(), what + ", captured");
}

TEST_P(MoeCudaOptions, ExpertBiases) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const Activation kind : {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared}) {
    MoeConfig c = gpu_config(16, 4, 60);
    c.expert_bias = true, c.activation.kind = kind;
    const std::string what = fmt::format("biases, activation {}", static_cast<int>(kind));
    check(c, even(P, 60), {}, what);
    check(c, even(P, 57), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, what + ", bf16 results", 8, true);
    check(c, ragged(P, 60), {.accumulate = true}, what + ", ragged, accumulated");
    for (const bool hot : {false, true}) check_routes(c, hard_batch(c, even(P, 50), 30, hot), {}, what + (hot ? ", hot expert" : ", routes with gaps"));
  }
  MoeConfig c = gpu_config(16, 4, 60);
  c.expert_bias = true, c.shared_F = 40, c.latent = 32;
  check(c, even(P, 60), {}, "biases, shared expert, latent width");
  check(gpu_config(8, 2, 40), even(P, 0), {}, "no tokens at all");
}

TEST_P(MoeCudaOptions, ExpertBiasesAtEveryRowPolicyAndRecomputeModeHaveTheSameBits) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 100);
  c.expert_bias = true;
  const mt::Weights<float> w = bf16_weights(c, 3);
  const mt::Batch batch = hard_batch(c, even(P, 100), 4, false);
  GpuMoe reference(c, P, w, {});
  reference.upload(batch), reference.step();
  const mt::Result want = reference.result();
  using Rows = DeviceMoePolicy::Rows;
  for (const Rows rows : {Rows::kGather, Rows::kPermute}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
      c.recompute = recompute;
      MoeGpuOptions options;
      options.layer.policy = {rows, rows};
      GpuMoe gpu(c, P, w, options);
      gpu.upload(batch), gpu.step();
      expect_same_bits(want, gpu.result(), fmt::format("rows {}, recompute {}", static_cast<int>(rows), static_cast<int>(recompute)));
    }
  }
}

// An expert's rows are in the order of their tokens at every P, and its gradients are sums over them in an order that hangs on the rows alone.
TEST_P(MoeCudaOptions, ExpertGradientsHaveTheBitsOfOneRank) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const bool hot : {false, true}) {
    MoeConfig c = gpu_config(16, 2, 96);
    c.expert_bias = true;
    const mt::Weights<float> w = bf16_weights(c, 21);
    const mt::Batch whole = hard_batch(c, {96}, 22, hot);
    mt::Batch split = whole;
    split.tokens = even(P, 96 / P);
    GpuMoe one(c, 1, w, {}), many(c, P, w, {});
    one.upload(whole), one.step(), many.upload(split), many.step();
    const mt::Result want = one.result(), got = many.result();
    EXPECT_TRUE(mt::same_bits(want.gradients.w1, got.gradients.w1));
    EXPECT_TRUE(mt::same_bits(want.gradients.w2, got.gradients.w2));
    EXPECT_TRUE(mt::same_bits(want.gradients.b1, got.gradients.b1));
    EXPECT_TRUE(mt::same_bits(want.gradients.b2, got.gradients.b2));
  }
}

TEST_P(MoeCudaOptions, AuxAndGlobalLossesTogether) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const bool masked : {false, true}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      MoeConfig c = gpu_config(16, 4, 64);
      c.router.score = score;
      c.aux_coefficient = 2, c.global_coefficient = 3, c.sequence_coefficient = 1, c.sequence_length = 16, c.z_coefficient = 0.3f;
      const std::string what = fmt::format("score {}, masked {}", static_cast<int>(score), masked);
      check(c, even(P, 64), {}, what + ", all four losses", 11, masked);
      c.sequence_coefficient = 0, c.aux_counts = AuxCounts::kUnbiased, c.bias_update_rate = 1e-3f;
      check(c, even(P, 64), {}, what + ", unbiased counts", 12, masked);
    }
  }
}

TEST_P(MoeCudaOptions, CapacityModeDropsWhatTheCpuDrops) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const double factor : {0.3, 1.0, 1e300}) {
    MoeConfig c = gpu_config(16, 4, 64);
    c.capacity_factor = factor;
    const std::string what = fmt::format("capacity factor {}", factor);
    check(c, even(P, 64), {}, what);
    check(c, even(P, 61), {.gradient_dtype = DType::kBF16}, what + ", masked", 9, true);
    check(c, ragged(P, 64), {}, what + ", ragged");
    for (const bool hot : {false, true}) check_routes(c, hard_batch(c, even(P, 50), 31, hot), {}, what + (hot ? ", hot expert" : ", routes with gaps"));
    c.expert_bias = true, c.aux_coefficient = 1;
    check(c, even(P, 64), {}, what + ", biases and a loss");
  }
  // More tokens than one warp places.
  MoeConfig longer = gpu_config(8, 3, 2100);
  longer.capacity_factor = 0.8;
  check(longer, even(P, P <= 2 ? 2100 : 1030), {}, "several segments of tokens");
  // The worked example of keep_routes.cu: capacity 1, 4 of 8 routes fit.
  MoeConfig c = gpu_config(4, 2, 4);
  c.capacity_factor = 0.5;
  mt::Batch batch = bf16_batch(c, {4}, 3);
  batch.replay = {0, 1, 0, 2, 1, 0, 1, 3};
  GpuMoe gpu(c, 1, bf16_weights(c, 2), {});
  gpu.upload(batch), gpu.step();
  EXPECT_EQ(gpu.result().dropped, 4);
  EXPECT_EQ(gpu.result().slots[0], 4);
}

TEST_P(MoeCudaOptions, ALargeCapacityIsDropless) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 64);
  const mt::Weights<float> w = bf16_weights(c, 3);
  const mt::Batch batch = bf16_batch(c, even(P, 64), 4);
  GpuMoe dropless(c, P, w, {});
  dropless.upload(batch), dropless.step();
  c.capacity_factor = 16;
  GpuMoe large(c, P, w, {});
  large.upload(batch), large.step();
  EXPECT_EQ(large.result().dropped, 0);
  expect_same_bits(dropless.result(), large.result(), "capacity of all routes");
}

// Slices of F on t ranks sum to the whole expert: against the CPU's slices, and against whole experts on the GPU.
TEST_P(MoeCudaOptions, ExpertTensorParallelSlicesSumToTheWholeExpert) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  if (P == 1) GTEST_SKIP() << "needs two ranks";
  for (int t = 2; t <= P; t *= 2) {
    for (const int features : {0, 1, 2}) {
      MoeConfig c = gpu_config(8, 3, 60, 64, 64);
      c.expert_bias = features > 0;
      if (features == 2) c.shared_F = 40, c.latent = 32, c.aux_coefficient = 1, c.global_coefficient = 0.5f, c.capacity_factor = 1.2;
      const mt::Weights<float> w = bf16_weights(c, 90);
      const std::vector<std::int64_t> tokens = features == 1 ? ragged(P, 60) : even(P, 60);
      const mt::Batch batch = bf16_batch(c, tokens, 91);
      GpuMoe whole(c, P, w, {});
      whole.upload(batch), whole.step();
      mt::Result want = whole.result();
      c.expert_tensor_parallel = t;
      const std::string what = fmt::format("t = {}, features {}", t, features);
      GpuMoe sliced(c, P, w, {});
      sliced.upload(batch), sliced.step();
      ASSERT_EQ(sliced.first_error(), "") << what;
      mt::Result got = sliced.result();
      EXPECT_EQ(got.ids, want.ids) << what;
      EXPECT_EQ(got.dropped, want.dropped) << what;
      expect_close(got.out, want.out, kNormBound, what + ": out"), expect_close(got.dx, want.dx, kNormBound, what + ": dx");
      expect_close(got.gradients.w1, want.gradients.w1, kNormBound, what + ": d_w1"),
          expect_close(got.gradients.w2, want.gradients.w2, kNormBound, what + ": d_w2");
      EXPECT_EQ(std::accumulate(got.slots.begin(), got.slots.end(), std::int64_t{0}),
                t * std::accumulate(want.slots.begin(), want.slots.end(), std::int64_t{0}));
      expect_agreement(c, w, batch, got, what);
      check(c, even(P, 57), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, what + ", bf16 results", 8, true);
      check_routes(c, hard_batch(c, even(P, 50), 32, true), {.accumulate = true}, what + ", hot expert");
    }
  }
}

MoeConfig everything(int P) {
  MoeConfig c = gpu_config(16, 4, 64, 64, 64);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 4;
  c.expert_bias = true, c.shared_F = 40, c.latent = 32, c.capacity_factor = 1.5, c.expert_tensor_parallel = P > 1 ? 2 : 1;
  c.aux_coefficient = 1, c.global_coefficient = 0.5f, c.sequence_coefficient = 0.5f, c.sequence_length = 16, c.z_coefficient = 0.1f;
  return c;
}

TEST_P(MoeCudaOptions, ReplaysWithEverythingOnHaveTheBitsOfEagerSteps) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = everything(P);
  const mt::Weights<float> w = bf16_weights(c, 40);
  GpuMoe eager(c, P, w, {}), captured(c, P, w, {});
  std::vector<mt::Batch> batches;
  std::vector<mt::Result> want;
  for (std::uint64_t b = 0; b < 8; ++b) {
    batches.push_back(bf16_batch(c, even(P, 64), 50 + 2 * b));
    eager.upload(batches.back()), eager.step();
    want.push_back(eager.result());
    expect_agreement(c, w, batches.back(), want.back(), fmt::format("batch {}", b));
  }
  captured.upload(batches[0]), captured.step();
  captured.capture();
  for (int round = 0; round < 1000; ++round) {
    const auto b = static_cast<std::size_t>(round * 5 % 8);
    captured.upload_rows(batches[b]);
    captured.replay();
    if (round < 16 || round % 25 == 0) {
      expect_same_bits(want[b], captured.result(), fmt::format("replay {}", round));
      EXPECT_EQ(captured.result().dropped, want[b].dropped);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Two groups of one process, each a part of the world, with layers of different E, K and P.
TEST(MoeCudaGroups, SeveralGroupsAndLayersOfDifferentSizesInOneProcess) {
  WB_NEEDS_GPU();
  struct Group {
    MoeConfig c;
    int P;
  };
  std::vector<Group> groups = {{gpu_config(16, 4, 60), 2}, {gpu_config(16, 4, 60), 2}, {gpu_config(8, 1, 60), 4}, {gpu_config(24, 6, 60), 1}};
  groups[3].c.expert_bias = true;
  std::vector<std::unique_ptr<GpuMoe>> layers;
  std::vector<mt::Weights<float>> weights;
  std::vector<mt::Batch> batches;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    weights.push_back(bf16_weights(groups[g].c, g == 1 ? 70 : 70 + g));  // the first two are replicas of one layer
    batches.push_back(bf16_batch(groups[g].c, even(groups[g].P, 60), 80 + 2 * g));
    layers.push_back(std::make_unique<GpuMoe>(groups[g].c, groups[g].P, weights.back(), MoeGpuOptions{}));
    layers.back()->upload(batches.back());
  }
  for (int round = 0; round < 3; ++round) {
    for (auto& layer : layers) layer->step();  // in turn: no group waits for another
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    EXPECT_EQ(layers[g]->first_error(), "");
    mt::Result got = layers[g]->result();
    expect_agreement(groups[g].c, weights[g], batches[g], got, fmt::format("group {}", g));
  }
}

}  // namespace
}  // namespace waybill::cuda
