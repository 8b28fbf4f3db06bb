// SPDX-License-Identifier: Apache-2.0
// The GPU exchange over the link of two GPUs of one process; skipped where there is one.
#include <gmock/gmock.h>

#include "cuda/exchange_harness.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

class ExchangeTwoGpus : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeTwoGpus, ::testing::Values(2, 4, 8));

TEST_P(ExchangeTwoGpus, EqualsTheCpuEngineToTheBitOverNvlink) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const int P = GetParam();
  const ts::Group group = ts::random_group(ragged_tokens(P, 300), 8, 64, 1024, RandomRoute{.seed = 40}, false);
  for (const DispatchPath path : {DispatchPath::kPush, DispatchPath::kBulk}) {
    for (const bool other : {false, true}) {
      GpuOptions options;
      options.devices = {0, 1}, options.tuning.dispatch = path, options.push_combine = options.pull_dispatch = other, options.handshake = true;
      options.x_dtype = other ? DType::kBF16 : DType::kF32;
      ExchangeConfig config = config_of(group);
      config.combine_wire = other ? CombineWire::kBF16 : CombineWire::kF32;
      compare(group, config, options, fmt::format("path {}, other {}", static_cast<int>(path), other));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ExchangeTwoGpus, ReplaysWithChangingRoutes) {
  if (num_gpus() < 2) GTEST_SKIP() << "needs 2 GPUs";
  const int P = GetParam();
  GpuOptions options;
  options.devices = {0, 1};
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
    for (int p = 0; p < P; ++p) expect_same_result(want[set][static_cast<std::size_t>(p)], gpu.result(p), fmt::format("replay {}", i));
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(gpu.group().first_error(), "");
}

}  // namespace
}  // namespace waybill::cuda
