// SPDX-License-Identifier: Apache-2.0
// The dense-map path of the MoE layer on GPUs: every trigger takes it on every rank, says why once and is counted; results are those of the CPU.
#include <gmock/gmock.h>

#include "cuda/moe_check.h"
#include "moe/warning_log.h"

namespace waybill::cuda {
namespace {

using mt::WarningLog;

class MoeCudaMap : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeCudaMap, ::testing::Values(1, 2, 4, 8), ::testing::PrintToStringParamName());

// One warning that names the reason, one count a rank and forward, replays included; the CPU's results; captured equal to eager.
void check_fallback(const MoeConfig& c, const mt::Batch& batch, const MoeGpuOptions& options, std::uint32_t reasons, const std::string& text,
                    const std::string& what) {
  const int P = static_cast<int>(batch.tokens.size());
  const mt::Weights<float> w = bf16_weights(c, 7);
  GpuMoe gpu(c, P, w, options);
  {
    const WarningLog log;
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    ASSERT_EQ(log.lines().size(), 1u) << what;
    EXPECT_THAT(log.lines()[0], ::testing::HasSubstr(text)) << what;
  }
  ASSERT_EQ(gpu.first_error(), "") << what;
  EXPECT_EQ(gpu.layer().num_dense_map_forwards(), 1) << what;
  for (int p = 0; p < P; ++p) EXPECT_EQ(gpu.report(p).dense_map_reasons, reasons) << what;
  mt::Result got = gpu.result();
  EXPECT_EQ(got.dense_forwards, P) << what;
  expect_agreement(c, w, batch, got, what);
  if ((reasons & kDenseMapDuplicateIds) != 0) return;  // looked for by the host: eager mode alone
  gpu.capture();
  gpu.upload(batch), gpu.zero_gradients(), gpu.replay();
  EXPECT_EQ(gpu.report(0).dense_map_forwards, 2u) << what;
  expect_same_bits(got, gpu.result(), what + ", captured");
}

std::vector<std::int64_t> ragged(int P, std::int64_t T) {
  std::vector<std::int64_t> tokens;
  for (int p = 0; p < P; ++p) tokens.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : T - p));
  return tokens;
}

TEST_P(MoeCudaMap, Forced) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (int features = 0; features < 3; ++features) {
    MoeConfig c = gpu_config(16, 4, 70);
    c.force_dense_map = true;
    if (features > 0) c.expert_bias = true, c.aux_coefficient = 1;
    if (features > 1) c.shared_F = 40, c.latent = 32, c.alignment = 16, c.capacity_factor = 1;
    const std::string what = fmt::format("forced, features {}", features);
    mt::Batch batch = bf16_batch(c, features == 1 ? ragged(P, 70) : even(P, 70), 30);
    for (std::int64_t t = 0; features == 2 && t < batch.T(); ++t) batch.mask.push_back(t % 5 == 2 ? 1 : 0);
    check_fallback(c, batch, {}, kDenseMapForced, "force_dense_map", what);
  }
}

TEST_P(MoeCudaMap, ForcedOnHardRoutes) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 50);
  c.force_dense_map = true;
  for (const bool hot : {false, true}) {
    mt::Batch batch = bf16_batch(c, even(P, 50), 31);
    for (std::int64_t t = 0; t < batch.T(); ++t) {
      for (std::int64_t k = 0; k < 4; ++k) {
        const std::int64_t id = hot ? (k == 0 ? 3 : 4 + (t + k) % 12) : (t * 5 + k * 3) % 16;
        batch.replay.push_back(t % 7 == 2 || (t % 3 == 1 && k == 3) ? -1 : static_cast<std::int32_t>(id));
      }
    }
    check_fallback(c, batch, {}, kDenseMapForced, "force_dense_map", hot ? "one hot expert" : "routes with gaps");
  }
  c = gpu_config(128, 3, 20), c.force_dense_map = true;
  check_fallback(c, bf16_batch(c, even(P, 20), 32), {}, kDenseMapForced, "force_dense_map", "empty experts");
  c = gpu_config(16, 16, 20), c.force_dense_map = true;
  check_fallback(c, bf16_batch(c, even(P, 20), 33), {}, kDenseMapForced, "force_dense_map", "K = E");
  check_fallback(c, bf16_batch(c, even(P, 0), 33), {}, kDenseMapForced, "force_dense_map", "no tokens at all");
}

TEST_P(MoeCudaMap, PaddedToCapacity) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const double factor : {0.5, 1.0, 8.0}) {
    MoeConfig c = gpu_config(16, 4, 64);
    c.capacity_factor = factor, c.pad_to_capacity = true, c.expert_bias = factor == 1.0;
    const std::string what = fmt::format("padded, factor {}", factor);
    check_fallback(c, bf16_batch(c, even(P, 64), 40), {}, kDenseMapPadToCapacity, "padded to their capacity", what);
    check_fallback(c, bf16_batch(c, ragged(P, 64), 41), {.gradient_dtype = DType::kBF16}, kDenseMapPadToCapacity, "padded to their capacity",
                   what + ", ragged");
    MoeGpuOptions gathered;
    gathered.layer.policy = {DeviceMoePolicy::Rows::kPermute, DeviceMoePolicy::Rows::kGather};
    check_fallback(c, bf16_batch(c, even(P, 60), 42), gathered, kDenseMapPadToCapacity, "padded to their capacity", what + ", the other row policies");
  }
}

TEST_P(MoeCudaMap, KAboveWhatCompactPlansTake) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(160, 136, 12);
  check_fallback(c, bf16_batch(c, even(P, 12), 50), {}, kDenseMapTopK, "K is above the limit", "K = 136");
}

TEST_P(MoeCudaMap, AFabricWithoutCompactExchange) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 60);
  MoeGpuOptions options;
  options.layer.compact_fabric = false;
  check_fallback(c, bf16_batch(c, even(P, 60), 60), options, kDenseMapFabric, "fabric engine has no compact exchange", "fabric");
}

TEST_P(MoeCudaMap, SlicesOfF) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  if (P == 1) GTEST_SKIP() << "needs two ranks";
  MoeConfig c = gpu_config(8, 3, 60, 64, 64);
  c.expert_bias = true, c.expert_tensor_parallel = 2, c.force_dense_map = true;
  check_fallback(c, bf16_batch(c, even(P, 60), 61), {}, kDenseMapForced, "force_dense_map", "two slices");
}

TEST_P(MoeCudaMap, DuplicateIdsOnOneRankTakeEveryRankThere) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 40);
  MoeGpuOptions options;
  options.layer.dense_map = true;
  mt::Batch batch = bf16_batch(c, even(P, 40), 70);
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    for (std::int64_t k = 0; k < 4; ++k) batch.replay.push_back(static_cast<std::int32_t>((t + 3 * k) % 16));
  }
  mt::Batch twice = batch;
  for (const std::int64_t t : {3, 17, 18}) twice.replay[static_cast<std::size_t>(4 * t + 2)] = twice.replay[static_cast<std::size_t>(4 * t)];
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (const bool renormalise : {false, true}) {
      c.router.score = score, c.router.renormalise = renormalise, c.router.scaling_factor = 1.5f;
      c.aux_coefficient = renormalise ? 1 : 0, c.global_coefficient = renormalise && score == ScoreFunction::kSigmoid ? 0.5f : 0;
      check_fallback(c, twice, options, kDenseMapDuplicateIds, "names an expert twice", fmt::format("duplicates, score {}", static_cast<int>(score)));
    }
  }
  c = gpu_config(16, 4, 40);
  // The same layer takes the compact path where it is legal, without a word.
  const mt::Weights<float> w = bf16_weights(c, 7);
  GpuMoe gpu(c, P, w, options);
  const WarningLog log;
  gpu.upload(batch), gpu.step();
  mt::Result got = gpu.result();
  expect_agreement(c, w, batch, got, "distinct ids");
  EXPECT_EQ(got.dense_forwards, 0);
  EXPECT_TRUE(log.lines().empty());
  gpu.upload(twice), gpu.step();
  EXPECT_EQ(gpu.result().dense_forwards, P);
  gpu.upload(batch), gpu.step();
  expect_same_bits(got, gpu.result(), "back on the compact path");
}

struct MapResult {
  mt::Result layer;
  std::vector<float> d_map;
};
MapResult cpu_map_result(MoeConfig c, const mt::Weights<float>& w, const mt::Batch& batch, const std::vector<float>& map) {
  c.recipe.kind = Recipe::kF32, c.combine_wire = CombineWire::kF32, c.mode = ExchangeMode::kEager, c.receive_factor = 0;
  const int P = static_cast<int>(batch.tokens.size());
  MapResult result{mt::empty_result(c, P, w, batch), std::vector<float>(map.size())};
  run_ranks(P, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    mt::RankRun rank(c, P, fabric.rank(), w, batch);
    std::vector<float> own(map.begin() + rank.first * c.E, map.begin() + (rank.first + rank.T) * c.E);
    mt::RunOptions options;
    options.forward.dense_map = TensorView::of(own.data(), {rank.T, c.E});
    rank.run(layer, c, batch, options);
    for (int turn = 0; turn < P; ++turn) {
      if (turn == fabric.rank()) {
        rank.collect(c, P, turn, layer, result.layer);
        const float* d = rank.step.d_dense_map.as<float>();
        std::copy(d, d + rank.T * c.E, result.d_map.begin() + rank.first * c.E);
      }
      fabric.barrier("test turn");
    }
  });
  return result;
}

std::vector<float> random_map(const MoeConfig& c, std::int64_t T, std::uint64_t seed) {
  std::vector<float> map = mt::random_values(static_cast<std::size_t>(T * c.E), seed, 0.5f);
  for (std::size_t i = 0; i < map.size(); ++i) {
    const bool routed = (i * 2654435761u >> 7) % 4 == 0 && i / static_cast<std::size_t>(c.E) % 6 != 1;  // some tokens go nowhere, some to more than K
    map[i] = routed ? std::abs(map[i]) + 0.01f : 0.0f;
  }
  return map;
}

TEST_P(MoeCudaMap, ACallersMapReplacesTheRouter) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const bool everything : {false, true}) {
    MoeConfig c = gpu_config(16, 4, 40);
    if (everything) c.shared_F = 40, c.latent = 32, c.expert_bias = true, c.aux_coefficient = 0.1f, c.bias_update_rate = 1e-3f;
    MoeGpuOptions options;
    options.layer.dense_map = true;
    const mt::Weights<float> w = bf16_weights(c, 80, everything);
    const mt::Batch batch = bf16_batch(c, everything ? ragged(P, 40) : even(P, 40), 81);
    const std::vector<float> map = random_map(c, batch.T(), 82);
    GpuMoe gpu(c, P, w, options);
    gpu.set_map(map);
    const WarningLog log;
    gpu.upload(batch), gpu.zero_gradients(), gpu.step();
    ASSERT_EQ(log.lines().size(), 1u);
    EXPECT_THAT(log.lines()[0], ::testing::HasSubstr("caller gave a dense map"));
    ASSERT_EQ(gpu.first_error(), "");
    mt::Result got = gpu.result();
    MapResult want = cpu_map_result(c, w, batch, map);
    EXPECT_EQ(got.dense_forwards, P);
    EXPECT_EQ(got.slots, want.layer.slots);
    expect_close(got.out, want.layer.out, kNormBound, "out"), expect_close(got.dx, want.layer.dx, kNormBound, "dx");
    expect_close(gpu.d_map(), want.d_map, kNormBound, "d_map");
    const std::vector<float> d_map = gpu.d_map();
    for (std::size_t i = 0; i < map.size(); ++i) ASSERT_TRUE(map[i] != 0.0f || d_map[i] == 0.0f) << i;
    expect_close(got.gradients.w1, want.layer.gradients.w1, kNormBound, "d_w1"), expect_close(got.gradients.w2, want.layer.gradients.w2, kNormBound, "d_w2");
    expect_close(got.gradients.b2, want.layer.gradients.b2, kNormBound, "d_b2"), expect_close(got.gradients.b1, want.layer.gradients.b1, kNormBound, "d_b1");
    for (const float value : got.gradients.gate) ASSERT_EQ(value, 0.0f);
    EXPECT_EQ(got.losses.aux, 0.0);
    if (everything) {
      const std::vector<std::int32_t> counts = gpu.total_counts(0);
      EXPECT_EQ(std::vector<std::int64_t>(counts.begin(), counts.end()), want.layer.counts);
    }
    gpu.capture();
    gpu.upload(batch), gpu.zero_gradients(), gpu.replay();
    expect_same_bits(got, gpu.result(), "captured");
    EXPECT_TRUE(mt::same_bits(d_map, gpu.d_map()));
  }
}

TEST_P(MoeCudaMap, ReplaysWithNewRoutesHaveTheBitsOfEagerSteps) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(16, 4, 48);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 4, c.force_dense_map = true;
  const mt::Weights<float> w = bf16_weights(c, 40);
  GpuMoe eager(c, P, w, {}), captured(c, P, w, {});
  std::vector<mt::Batch> batches;
  std::vector<mt::Result> want;
  for (std::uint64_t b = 0; b < 4; ++b) {
    batches.push_back(bf16_batch(c, even(P, 48), 50 + 2 * b));
    eager.upload(batches.back()), eager.step();
    want.push_back(eager.result());
  }
  captured.upload(batches[0]), captured.step(), captured.capture();
  for (int round = 0; round < 100; ++round) {
    const auto b = static_cast<std::size_t>(round * 3 % 4);
    captured.upload_rows(batches[b]), captured.replay();
    if (round % 10 < 4) expect_same_bits(want[b], captured.result(), fmt::format("replay {}", round));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(MoeCudaMap, AnExceededBudgetChangesNothing) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  if (P == 1) GTEST_SKIP() << "one rank receives what it brings";
  MoeConfig c = gpu_config(16, 1, 16);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1, c.force_dense_map = true;
  mt::Batch batch = bf16_batch(c, even(P, 16), 61);
  batch.replay.assign(static_cast<std::size_t>(batch.T()), 0);  // all to rank 0, which holds 16 slots
  GpuMoe gpu(c, P, bf16_weights(c, 60), {.accumulate = true});
  gpu.upload(batch), gpu.zero_gradients(), gpu.step();
  const mt::Result got = gpu.result();
  for (int p = 0; p < P; ++p) EXPECT_TRUE(gpu.report(p).valid == 0 && gpu.report(p).max_slot_demand == 16 * P) << "rank " << p;
  EXPECT_TRUE(gpu.status(0).overflowed());
  EXPECT_EQ(gpu.status(0).slot_demand, 16 * P);
  EXPECT_TRUE(std::all_of(got.out.begin(), got.out.end(), [](float v) { return v == 0.0f; }));
  EXPECT_TRUE(std::all_of(got.gradients.w1.begin(), got.gradients.w1.end(), [](float v) { return v == 0.0f; }));
}

TEST(MoeCudaMapInput, WhatIsNotLegalIsRefusedByName) {
  const auto refusal = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  MoeConfig c = gpu_config(16, 4, 30);
  c.force_dense_map = true, c.allow_dense_map = false;
  EXPECT_THAT(refusal([&] { (void)DeviceMoeLayer::arena_bytes(c, 2); }), ::testing::HasSubstr("allow_dense_map is off: force_dense_map is set"));
  MoeConfig wide = gpu_config(160, 136, 30);
  EXPECT_EQ(refusal([&] { (void)DeviceMoeLayer::arena_bytes(wide, 2); }), "");
  const MoeConfig plain = gpu_config(16, 4, 30);
  DeviceMoeOptions room;
  room.dense_map = true;
  EXPECT_GE(DeviceMoeLayer::arena_bytes(plain, 2, room), DeviceMoeLayer::arena_bytes(plain, 2) + 2 * 30 * 16 * 5);
  WB_NEEDS_GPU();
  const mt::Batch batch = bf16_batch(plain, {30, 30}, 1);
  GpuMoe gpu(plain, 2, bf16_weights(plain, 2), {});
  gpu.set_map(std::vector<float>(60 * 16, 0.5f));
  gpu.upload(batch);
  EXPECT_THAT(refusal([&] { gpu.forward(0, gpu.stream()); }), ::testing::HasSubstr("DeviceMoeOptions::dense_map"));
}

}  // namespace
}  // namespace waybill::cuda
