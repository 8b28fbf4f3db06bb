// SPDX-License-Identifier: Apache-2.0
// Exact sizes: the bits of budgets, memory as large as the fullest step, refusals; and the buffer that grows in place.
#include <gmock/gmock.h>

#include "core/cuda/dense_matmul.h"
#include "core/cuda/growable_buffer.h"
#include "core/cuda/num_sms.h"
#include "core/cuda/work_room.h"
#include "cuda/moe_harness.h"
#include "moe/warning_log.h"

namespace waybill::cuda {
namespace {

std::vector<std::int64_t> tokens_of(int P, std::int64_t T) { return std::vector<std::int64_t>(static_cast<std::size_t>(P), T); }

// The same batch in captured mode at a budget that holds all, and at exact sizes; what one rank's slots took.
void expect_same_as_budgets(MoeConfig c, int P, const std::vector<mt::Batch>& batches, MoeGpuOptions options, const std::string& what) {
  const mt::Weights<float> w = bf16_weights(c, 3);
  MoeConfig fixed = c;
  fixed.mode = ExchangeMode::kCaptured, fixed.receive_factor = P;
  MoeGpuOptions in_order = options;
  in_order.layer.exact_sizes = false;
  GpuMoe budget(fixed, P, w, in_order);
  options.layer.exact_sizes = true;
  GpuMoe exact(c, P, w, options);
  EXPECT_EQ(exact.layer().host_waits(), 1);
  EXPECT_EQ(budget.layer().host_waits(), 0);
  for (std::size_t b = 0; b < batches.size(); ++b) {
    budget.upload(batches[b]), budget.step();
    exact.upload(batches[b]), exact.step();
    expect_same_bits(budget.result(), exact.result(), fmt::format("{}, batch {}", what, b));
  }
}

mt::Batch with_replay(mt::Batch batch, const std::function<std::int32_t(std::int64_t t, std::int64_t k)>& id, std::int64_t K) {
  batch.replay.resize(static_cast<std::size_t>(batch.T() * K));
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    for (std::int64_t k = 0; k < K; ++k) batch.replay[static_cast<std::size_t>(t * K + k)] = id(t, k);
  }
  return batch;
}

class MoeSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeSizes, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

// Before any size is known: a step that cannot be rehearsed warns, and its kernels load while peers wait.
TEST_P(MoeSizes, TheFirstStepIsRehearsedWithoutAComplaint) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig base = gpu_config(16, 4, 100);
  for (const Recompute recompute : {Recompute::kNone, Recompute::kLayer}) {
    for (const int sms : {0, 16}) {
      const test::WarningLog log("loaded when they are launched");
      MoeConfig c = base;
      c.recompute = recompute;
      MoeGpuOptions options;
      options.layer.exact_sizes = true, options.layer.policy.combine_sms = sms;
      GpuMoe layer(c, P, bf16_weights(c, 3), options);
      layer.upload(bf16_batch(c, tokens_of(P, 50), 11)), layer.step();
      EXPECT_THAT(log.lines(), ::testing::IsEmpty()) << "combine_sms " << sms;
    }
  }
}

TEST_P(MoeSizes, ExactSizesHaveTheBitsOfBudgetsOnHardRoutes) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 4, 100);
  std::vector<std::int64_t> ragged;
  for (int p = 0; p < P; ++p) ragged.push_back(p % 2 == 0 ? 77 : 0);
  // Sizes that grow, shrink, vanish and grow again; experts 0 to 3 take all, the others stay empty; routes of -1.
  const std::vector<mt::Batch> batches{
      bf16_batch(c, tokens_of(P, 8), 11),
      bf16_batch(c, tokens_of(P, 100), 12),
      bf16_batch(c, tokens_of(P, 0), 13),
      bf16_batch(c, ragged, 14),
      with_replay(
          bf16_batch(c, tokens_of(P, 100), 15), [](std::int64_t, std::int64_t k) { return static_cast<std::int32_t>(k); }, 4),
      with_replay(
          bf16_batch(c, tokens_of(P, 40), 16), [](std::int64_t t, std::int64_t k) { return t % 3 == 0 ? -1 : static_cast<std::int32_t>(4 * k); }, 4)};
  for (const bool resend : {false, true}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
      MoeConfig other = c;
      other.recompute = recompute;
      MoeGpuOptions options;
      options.layer.resend_rows = resend;
      expect_same_as_budgets(other, P, batches, options, fmt::format("recompute {}, rows sent again {}", static_cast<int>(recompute), resend));
    }
  }
  expect_same_as_budgets(gpu_config(16, 16, 40), P, {bf16_batch(gpu_config(16, 16, 40), tokens_of(P, 40), 17)}, {}, "K = E");
  MoeConfig all = gpu_config(16, 4, 60);
  all.shared_F = 24, all.latent = 32;
  MoeGpuOptions resent;
  resent.layer.resend_rows = true;
  expect_same_as_budgets(all, P, {bf16_batch(all, tokens_of(P, 60), 18)}, resent, "shared expert and latent width");
  // As many rows an expert as parts of wgrad need.
  const MoeConfig large = gpu_config(8, 2, 2048, 256, 128);
  expect_same_as_budgets(large, P, {bf16_batch(large, tokens_of(P, 2048), 19)}, {}, "larger");
}

TEST_P(MoeSizes, MemoryIsThatOfTheFullestStep) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  const MoeConfig c = gpu_config(16, 8, 4096, 256, 256);
  MoeGpuOptions options;
  options.layer.exact_sizes = true;
  GpuMoe gpu(c, P, bf16_weights(c, 3), options);
  const auto held = [&] { return gpu.layer().slot_bytes(gpu.step_of(), 0); };
  const std::size_t unit = GrowableBuffer::granularity(0);
  const auto up = [&](std::size_t bytes) { return (bytes + unit - 1) / unit * unit; };
  const auto logits = static_cast<std::size_t>(4096 * c.E * 4);  // whose gradient lies where dh was
  EXPECT_EQ(held(), up(logits)) << "before the first step";
  std::size_t seen = 0;
  for (const std::int64_t T : {64, 4096, 128}) {
    gpu.upload(bf16_batch(c, tokens_of(P, T), 7)), gpu.step();
    const std::int64_t slots = gpu.report(0).slots;
    // [slots, 2F] or f32 [T_max, E]; [slots, F] and [slots, H], or f32 [T_max, H]
    const std::size_t base = 4096 * 256 * 4;
    const auto n = static_cast<std::size_t>(slots) * 256 * 2;
    seen = std::max(seen, up(std::max(2 * n, logits)) + up(std::max(n, base)) + up(std::max({n, base, logits})));
    EXPECT_EQ(held(), seen) << "T = " << T;
    const DeviceMoeMemory predicted = DeviceMoeLayer::memory(c, P, options.layer, slots), worst = DeviceMoeLayer::memory(c, P, {});
    EXPECT_LE(predicted.total(), worst.total() + 3 * unit) << "P = " << P;
  }
  EXPECT_THROW(gpu.capture(), Error);
}

// The prediction is what a step takes of its stream's room, under every recipe: no more, and no less.
TEST(MoeSizesRoom, AStepTakesThePredictedRoomOfItsStream) {
  WB_NEEDS_GPU();
  for (const Recipe recipe : {Recipe::kBF16, Recipe::kFP8, Recipe::kMXFP8}) {
    for (const std::int64_t shared_F : {0, 256}) {
      MoeConfig c = gpu_config(8, 2, 2048, 256, 192);
      c.recipe.kind = recipe, c.shared_F = shared_F;
      GpuMoe gpu(c, 2, bf16_weights(c, 3), {});
      gpu.upload(bf16_batch(c, tokens_of(2, 2048), 7));
      std::vector<std::unique_ptr<CudaStream>> streams;  // until one whose handle no test before has used
      do streams.push_back(std::make_unique<CudaStream>(0));
      while (work_room(0, *streams.back()).bytes() > 0);
      const CudaStream& stream = *streams.back();
      gpu.forward(0, stream), gpu.backward(0, stream);
      stream.synchronize();
      const std::size_t predicted = DeviceMoeLayer::memory(c, 2, {}, 0, num_sms(0)).operations;
      EXPECT_EQ(work_room(0, stream).bytes(), predicted) << to_string(recipe) << ", shared " << shared_F;
    }
  }
}

// A layer and a step take what was predicted, within 2%, under every recipe and form. In this process: other programs may use the GPU, too.
TEST(MoeSizesRoom, ALayerTakesThePredictedMemory) {
  WB_NEEDS_GPU();
  register_moe_kernels();
  prepare_dense_matmul(0);  // what a process makes once
  const auto expect_predicted = [](const MoeConfig& c, const DeviceMoeOptions& options, const std::string& what) {
    constexpr int P = 2;
    const std::vector<int> devices{0};
    CudaLocalGroup group(P, devices, DeviceMoeLayer::arena_bytes(c, P, options));
    const AllocationTrace trace;
    DeviceMoeLayer layer(
        c, local_ranks(group, 0), 0, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); }, options);
    const DeviceMoeStep step = layer.make_step();
    const DeviceMoeMemory predicted = DeviceMoeLayer::memory(c, P, options, 0, num_sms(0));
    EXPECT_NEAR(static_cast<double>(trace.total_bytes()), static_cast<double>(P * (predicted.scratch + predicted.step)),
                0.02 * static_cast<double>(trace.total_bytes()))
        << what;
  };
  for (const Recipe recipe : {Recipe::kBF16, Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4}) {
    for (const int form : {0, 1, 2, 3}) {
      MoeConfig c = gpu_config(16, 4, 2048, 512, 256);
      c.recipe.kind = recipe, c.shared_F = form == 1 ? 256 : 0, c.latent = form == 2 ? 256 : 0;
      c.recompute = form == 2 ? Recompute::kLayer : Recompute::kNone;
      DeviceMoeOptions options;
      options.policy.combine_sms = form == 3 ? 32 : 0, options.policy.whole_x = form == 3, options.resend_rows = form == 1;
      expect_predicted(c, options, fmt::format("{}, form {}", to_string(recipe), form));
    }
  }
}

TEST(MoeSizesRoom, SmallerGpusAndNarrowerTilesTakeLess) {
  MoeConfig c = gpu_config(8, 2, 8192, 2048, 1024);  // partial tiles are more than the gate's operands
  const auto room = [&](int num_sms) { return DeviceMoeLayer::memory(c, 2, {}, 0, num_sms).operations; };
  const std::size_t whole = room(132), pcie = room(114);
  EXPECT_LT(pcie, whole);
  EXPECT_LE(room(16), pcie);
  // Two tiles of 128 x 256 fp32 a unit, or of 192 x 128 under fp8.
  const std::size_t units = 66 * 2 * 13 / 8 + 66;
  EXPECT_EQ(whole, units * 2 * 128 * 256 * 4);
  c.recipe.kind = Recipe::kFP8;
  EXPECT_EQ(room(132), units * 2 * 128 * 192 * 4);
}

TEST(MoeSizesTwoGpus, ExactSizesHaveTheBitsOfBudgets) {
  if (all_devices(2).size() < 2) GTEST_SKIP() << "needs two GPUs";
  const MoeConfig c = gpu_config(32, 8, 256, 512, 320);
  MoeGpuOptions options;
  options.devices = {0, 1};
  for (const bool resend : {false, true}) {
    options.layer.resend_rows = resend;
    expect_same_as_budgets(c, 2, {bf16_batch(c, {16, 256}, 21), bf16_batch(c, {256, 256}, 22)}, options, fmt::format("two GPUs, rows sent again {}", resend));
  }
}

TEST(MoeSizesInput, ExactSizesBelongToEagerModeAtTheWorstCase) {
  MoeConfig c = gpu_config(16, 4, 30);
  DeviceMoeOptions options;
  options.exact_sizes = true;
  EXPECT_GT(DeviceMoeLayer::arena_bytes(c, 2, options), 0u);
  c.receive_factor = 1.5;
  EXPECT_THROW((void)DeviceMoeLayer::arena_bytes(c, 2, options), Error);
  c.receive_factor = 0, c.mode = ExchangeMode::kCaptured;
  EXPECT_THROW((void)DeviceMoeLayer::arena_bytes(c, 2, options), Error);
}

TEST(MoeSizesInput, RowsThatAreSentAgainSaveTheirWindows) {
  const MoeConfig c = gpu_config(16, 4, 1024, 256, 64);
  DeviceMoeOptions kept, resent;
  kept.num_steps = resent.num_steps = 3, resent.resend_rows = true;
  // [P T_max, H] bf16 a step
  EXPECT_EQ(DeviceMoeLayer::arena_bytes(c, 2, kept) - DeviceMoeLayer::arena_bytes(c, 2, resent), std::size_t{3} * 2048 * 256 * 2);
}

// Nothing crosses a link: matmuls read x and d_out where they are, and only a shared expert's result meets partials.
TEST(MoeSizesInput, OneRankHasNoWindowsOfRows) {
  MoeConfig c = gpu_config(16, 4, 1024, 256, 64);
  const auto bytes = [&](int P) { return static_cast<std::int64_t>(DeviceMoeLayer::arena_bytes(c, P)); };
  const std::int64_t alone = bytes(1), row_window = 1024 * 256 * 2, partials = 1024 * 256 * 4;
  EXPECT_LT(alone, row_window) << "routes and counters";
  c.shared_F = 64;
  EXPECT_EQ(bytes(1) - alone, partials);
  c.latent = 256;  // the projected rows
  EXPECT_EQ(bytes(1) - alone, partials + row_window);
  DeviceMoeOptions resent;
  resent.resend_rows = true;
  c.latent = c.shared_F = 0;
  EXPECT_EQ(static_cast<std::int64_t>(DeviceMoeLayer::arena_bytes(c, 1, resent)), alone);
}

TEST(MoeSizesInput, BlocksOfColumnsByPolicy) {
  const auto total = [](const MoeConfig& c, int P, int blocks, bool exact = true) {
    DeviceMoeOptions options;
    options.exact_sizes = exact, options.column_blocks = blocks;
    return DeviceMoeLayer::memory(c, P, options).total();
  };
  const MoeConfig wide = gpu_config(16, 4, 4096, 2048, 256);  // 1,024 rows an expert
  EXPECT_LT(total(wide, 1, 2), total(wide, 1, 1));
  EXPECT_EQ(total(wide, 1, 0), total(wide, 1, 2));
  const auto expect_one = [&](const MoeConfig& c, int P, bool exact, const char* what) { EXPECT_EQ(total(c, P, 0, exact), total(c, P, 1, exact)) << what; };
  expect_one(wide, 2, true, "two ranks");
  expect_one(wide, 1, false, "a budget");
  expect_one(gpu_config(16, 4, 4096, 1024, 256), 1, true, "narrow rows");
  expect_one(gpu_config(64, 4, 4096, 2048, 256), 1, true, "few rows an expert");
  MoeConfig other = wide;
  other.shared_F = 64;
  expect_one(other, 1, true, "a shared expert");
  other.shared_F = 0, other.expert_bias = true;
  expect_one(other, 1, true, "expert biases");
  DeviceMoeOptions negative;
  negative.column_blocks = -1;
  EXPECT_THROW((void)DeviceMoeLayer::arena_bytes(wide, 1, negative), Error);
}

TEST(GrowableBufferCuda, GrowsInPlaceAndKeepsItsContents) {
  WB_NEEDS_GPU();
  const std::size_t unit = GrowableBuffer::granularity(0);
  GrowableBuffer buffer(5 * unit, 0);
  EXPECT_EQ(buffer.bytes(), 0u);
  buffer.grow(1);
  EXPECT_EQ(buffer.bytes(), unit);
  void* const at = buffer.data();
  WB_TRY_CUDA(cudaMemset(at, 0x5a, unit));
  buffer.grow(3 * unit + 1);
  EXPECT_EQ(buffer.data(), at);
  EXPECT_EQ(buffer.bytes(), 4 * unit);
  WB_TRY_CUDA(cudaMemset(static_cast<unsigned char*>(at) + unit, 0x11, 3 * unit));
  std::vector<unsigned char> seen(4 * unit);
  WB_TRY_CUDA(cudaMemcpy(seen.data(), at, seen.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(seen[0], 0x5a);
  EXPECT_EQ(seen[unit - 1], 0x5a);
  EXPECT_EQ(seen[unit], 0x11);
  EXPECT_EQ(seen.back(), 0x11);
  buffer.grow(2 * unit);
  EXPECT_EQ(buffer.bytes(), 4 * unit);
  EXPECT_THROW(buffer.grow(5 * unit + 1), Error);
}

}  // namespace
}  // namespace waybill::cuda
