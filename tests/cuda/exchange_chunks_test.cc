// SPDX-License-Identifier: Apache-2.0
// Steps of the GPU exchange that overlap: permute beside the chunks of a dispatch, reduction and combine in one launch. The bits are those of the
// CPU engine.
#include <gmock/gmock.h>

#include "cuda/exchange_harness.h"

namespace waybill::cuda {
namespace {

using ts::RandomRoute;

struct Case {
  int P;
  std::int64_t T, K, E, H;
};

class ExchangeChunksCuda : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeChunksCuda,
                         ::testing::Values(Case{1, 65, 4, 16, 64}, Case{2, 130, 8, 64, 512}, Case{2, 77, 36, 2304, 512}, Case{4, 100, 6, 64, 1032},
                                           Case{8, 63, 8, 256, 256}, Case{36, 20, 36, 72, 64}, Case{72, 17, 36, 2304, 64}, Case{72, 9, 1, 144, 128}));

// Chunks of 32 tokens: several of each rank.
TEST_P(ExchangeChunksCuda, ChunksAndFusedCombineGiveTheSameBits) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  const ts::Group group = ts::random_group(ragged_tokens(c.P, 3 * c.T), c.K, c.E, c.H, RandomRoute{.seed = 9}, false);
  for (const bool half : {false, true}) {
    GpuOptions options;
    options.fused_combine = true, options.tuning.fused_combine_ctas = 32, options.weighted = options.handshake = half;
    options.chunks = GpuGroup(config_of(group), group.placement, options).exchange().supports_chunks();
    EXPECT_EQ(options.chunks, c.P <= 66);
    options.x_dtype = options.out_dtype = half ? DType::kBF16 : DType::kF32;
    ExchangeConfig config = config_of(group);
    config.combine_wire = half ? CombineWire::kBF16 : CombineWire::kF32, config.alignment = half ? 8 : 1;
    compare(group, config, options, fmt::format("chunks, fused, bf16 {}", half));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ExchangeChunksCuda, BothReductionsGiveTheSameBits) {
  WB_NEEDS_GPU();
  const Case& c = GetParam();
  const ts::Group group = ts::random_group(ragged_tokens(c.P, c.T), c.K, c.E, c.H, RandomRoute{.seed = 10}, false);
  for (const ReducePath path : {ReducePath::kPlain, ReducePath::kBulk}) {
    GpuOptions options;
    options.tuning.reduce = path, options.weighted = path == ReducePath::kPlain;
    compare(group, config_of(group), options, fmt::format("reduction {}", static_cast<int>(path)));
    options.weighted = !options.weighted, options.x_dtype = DType::kBF16;
    compare(group, config_of(group), options, fmt::format("reduction {}, bf16", static_cast<int>(path)));
    if (HasFatalFailure()) return;
  }
}

TEST(ExchangeChunksGraphCuda, ThousandsOfReplays) {
  WB_NEEDS_GPU();
  constexpr int P = 4, kReplays = 3000;
  GpuOptions options;
  options.chunks = options.fused_combine = true, options.tuning.fused_combine_ctas = 32;
  std::vector<ts::Group> groups;
  std::vector<std::vector<ts::RankResult>> want;
  for (std::uint64_t s = 0; s < 3; ++s) {
    groups.push_back(ts::random_group({90, 200, 33, 151}, 6, 64, 128, RandomRoute{.seed = 90 + s}, false));
    want.push_back(ts::run_group(groups.back(), config_of(groups.back())));
  }
  GpuGroup gpu(config_of(groups[0]), groups[0].placement, options);
  gpu.upload(groups[0]);
  gpu.step();
  gpu.capture();
  for (int i = 0; i < kReplays; ++i) {
    const std::size_t set = static_cast<std::size_t>(i / 100 % 3);
    if (i % 100 == 0) gpu.synchronize(), gpu.upload(groups[set]);
    gpu.replay();
    if (i % 500 != 499) continue;
    gpu.synchronize();
    for (int p = 0; p < P; ++p) ASSERT_EQ(want[set][static_cast<std::size_t>(p)].out, gpu.result(p).out) << "replay " << i << ", rank " << p;
  }
  EXPECT_EQ(gpu.group().first_error(), "");
  for (int p = 0; p < P; ++p) {
    for (const ExchangeSignal signal : {kSignalChunks, kSignalArrived, kSignalPartials, kSignalPulled})
      ASSERT_EQ(gpu.epoch(p, signal), kReplays + 1u) << signal;
  }
}

}  // namespace
}  // namespace waybill::cuda
