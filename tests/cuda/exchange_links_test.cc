// SPDX-License-Identifier: Apache-2.0
// The GPU exchange between launches that run beside each other: on two GPUs of one process, over their link (skipped where there is one), and on one GPU.
#include <gmock/gmock.h>

#include <random>

#include "cuda/exchange_harness.h"
#include "cuda/gemm_spin.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

GpuOptions two_gpus() {
  GpuOptions options;
  options.devices = {0, 1}, options.tuning.fused_combine_ctas = 32;
  return options;
}

class ExchangeTwoGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeTwoGpus, ::testing::Values(2, 4, 8));
class ExchangeTwoLaunches : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeTwoLaunches, ::testing::Values(2, 4, 8));

void equals_the_cpu_engine(const GpuOptions& base, int P) {
  const ts::Group group = ts::random_group(ragged_tokens(P, 300), 8, 64, 1024, RandomRoute{.seed = 40}, false);
  for (const DispatchPath path : {DispatchPath::kPush, DispatchPath::kBulk}) {
    for (const bool other : {false, true}) {
      GpuOptions options = base;
      options.tuning.dispatch = path, options.push_combine = options.pull_dispatch = other, options.handshake = true;
      options.x_dtype = other ? DType::kBF16 : DType::kF32;
      ExchangeConfig config = config_of(group);
      config.combine_wire = other ? CombineWire::kBF16 : CombineWire::kF32;
      compare(group, config, options, fmt::format("path {}, other {}", static_cast<int>(path), other));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

void chunks_give_the_same_bits(const GpuOptions& base, int P) {
  const ts::Group group = ts::random_group(ragged_tokens(P, 700), 8, 64, 1024, RandomRoute{.seed = 41}, false);
  for (const bool half : {false, true}) {
    GpuOptions options = base;
    options.chunks = options.fused_combine = true, options.handshake = options.weighted = half;
    options.x_dtype = options.out_dtype = half ? DType::kBF16 : DType::kF32;
    ExchangeConfig config = config_of(group);
    config.combine_wire = half ? CombineWire::kBF16 : CombineWire::kF32;
    compare(group, config, options, fmt::format("chunks, bf16 {}", half));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Each launch's stream is held up before every kernel by up to 5 ms, at random: ranks come early and late to every signal.
void ranks_may_be_late(const GpuOptions& base, int P) {
  std::mt19937 random(17);
  for (int round = 0; round < 6; ++round) {
    GpuOptions options = base;
    options.chunks = options.fused_combine = round % 2 == 1, options.handshake = round % 3 == 1;
    options.delay = [&](cudaStream_t stream) { spin(static_cast<double>(random() % 5001) * 1e-3, stream); };
    const ts::Group group = ts::random_group(ragged_tokens(P, 300), 8, 64, 512, RandomRoute{.seed = 50 + static_cast<std::uint64_t>(round)}, false);
    compare(group, config_of(group), options, fmt::format("round {}", round));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

void a_lost_peer_is_named(const GpuOptions& base) {
  const ts::Group group = ts::random_group({90, 80}, 4, 32, 64, RandomRoute{.seed = 5}, false);
  for (const bool after_rows : {false, true}) {
    GpuOptions options = base;
    options.chunks = options.fused_combine = true, options.timeout = std::chrono::milliseconds(1500);
    GpuGroup gpu(config_of(group), group.placement, options);
    gpu.upload(group);
    gpu.step();
    ASSERT_EQ(gpu.group().first_error(), "");
    gpu.queue(1, gpu.stream(1), after_rows ? GpuGroup::Until::kRows : GpuGroup::Until::kPlan);
    gpu.queue(0, gpu.stream(0), GpuGroup::Until::kEnd);
    gpu.synchronize();
    const ts::RankResult got = gpu.result(0);
    EXPECT_EQ(got.status.flags, kStatusTimeout) << after_rows;
    EXPECT_EQ(got.status.timeout_peer, 1);
    EXPECT_EQ(got.status.timeout_phase, kExchangePhase + (after_rows ? kSignalPartials : kSignalRows));
    EXPECT_FALSE(got.handle.valid);
    EXPECT_THAT(gpu.group().first_error(), ::testing::HasSubstr("rank 0 waited for rank 1"));
  }
}

void replays_with_changing_routes(const GpuOptions& base, int P) {
  GpuOptions options = base;
  options.chunks = options.fused_combine = P == 2;
  std::vector<ts::Group> groups;
  std::vector<std::vector<ts::RankResult>> want;
  for (std::uint64_t s = 0; s < 3; ++s) {
    groups.push_back(ts::random_group(std::vector<std::int64_t>(static_cast<std::size_t>(P), 128), 6, 64, 512, RandomRoute{.seed = 70 + s}, false));
    want.push_back(ts::run_group(groups.back(), config_of(groups.back())));
  }
  GpuGroup gpu(config_of(groups[0]), groups[0].placement, options);
  gpu.upload(groups[0]);
  gpu.step();
  gpu.capture();
  for (int i = 0; i < 3000; ++i) {
    const std::size_t set = static_cast<std::size_t>(i / 100 % 3);
    if (i % 100 == 0) gpu.synchronize(), gpu.upload(groups[set]);
    gpu.replay();
    if (i % 500 != 499) continue;
    gpu.synchronize();
    for (int p = 0; p < P; ++p) ASSERT_EQ(want[set][static_cast<std::size_t>(p)].out, gpu.result(p).out) << "replay " << i << ", rank " << p;
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(gpu.group().first_error(), "");
}

TEST_P(ExchangeTwoGpus, EqualsTheCpuEngineToTheBitOverNvlink) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  equals_the_cpu_engine(two_gpus(), GetParam());
}
TEST_P(ExchangeTwoGpus, ChunksAndFusedCombineGiveTheSameBitsOverNvlink) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  chunks_give_the_same_bits(two_gpus(), GetParam());
}
TEST_P(ExchangeTwoGpus, RanksUpToFiveMillisecondsApartGiveTheSameBits) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  ranks_may_be_late(two_gpus(), GetParam());
}
TEST(ExchangeTwoGpusLost, APeerThatEndsAfterThePlanOrAfterItsRowsIsNamed) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  a_lost_peer_is_named(two_gpus());
}
TEST_P(ExchangeTwoGpus, ReplaysWithChangingRoutes) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  replays_with_changing_routes(two_gpus(), GetParam());
}

TEST_P(ExchangeTwoLaunches, EqualsTheCpuEngineToTheBit) {
  WB_NEEDS_GPU();
  equals_the_cpu_engine(two_launches(GetParam()), GetParam());
}
TEST_P(ExchangeTwoLaunches, ChunksAndFusedCombineGiveTheSameBits) {
  WB_NEEDS_GPU();
  chunks_give_the_same_bits(two_launches(GetParam()), GetParam());
}
TEST_P(ExchangeTwoLaunches, RanksUpToFiveMillisecondsApartGiveTheSameBits) {
  WB_NEEDS_GPU();
  ranks_may_be_late(two_launches(GetParam()), GetParam());
}
TEST(ExchangeTwoLaunchesLost, APeerThatEndsAfterThePlanOrAfterItsRowsIsNamed) {
  WB_NEEDS_GPU();
  a_lost_peer_is_named(two_launches(2));
}
TEST_P(ExchangeTwoLaunches, ReplaysWithChangingRoutes) {
  WB_NEEDS_GPU();
  replays_with_changing_routes(two_launches(GetParam()), GetParam());
}

}  // namespace
}  // namespace waybill::cuda
