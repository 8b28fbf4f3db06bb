// SPDX-License-Identifier: Apache-2.0
// Field cases on the MoE layer of GPUs.
#include "cuda/moe_harness.h"

namespace waybill::cuda {
namespace {

using Choose = std::function<std::vector<std::int32_t>(std::int64_t t)>;

TEST(MoeCudaCases, F26_ReplaysWithNewRoutesEqualEagerAndAnOverflowIsReported) {
  WB_NEEDS_GPU();
  MoeConfig c = gpu_config(8, 4, 64);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1.171875;
  const auto id = [](std::int64_t e) { return static_cast<std::int32_t>(e % 8); };
  const Choose balanced = [&](std::int64_t t) { return std::vector{id(t), id(t + 1), id(t + 2), id(t + 3)}; };
  const Choose skewed = [&](std::int64_t t) { return std::vector{0, 1 + id(t % 3), 4 + id(t % 4), 4 + id((t + 1) % 4)}; };
  const Choose one_source = [&](std::int64_t t) { return t < 64 ? std::vector{-1, -1, -1, -1} : balanced(t); };
  const Choose one_rank = [](std::int64_t) { return std::vector{0, 1, 2, 3}; };
  const Choose nothing = [](std::int64_t) { return std::vector{-1, -1, -1, -1}; };
  const mt::Weights<float> w = bf16_weights(c, 26);
  GpuMoe eager(c, 2, w, {}), captured(c, 2, w, {});
  EXPECT_EQ(captured.layer().budget().slots, 300);
  EXPECT_EQ(captured.layer().budget().rows, 128);
  const Choose order[] = {balanced, skewed, one_source, one_rank, nothing, balanced};
  for (std::uint64_t replay = 0; replay < 12; ++replay) {
    const Choose& choose = order[replay % 6];
    mt::Batch batch = bf16_batch(c, {64, 64}, 2 * replay);
    for (std::int64_t t = 0; t < 128; ++t) {
      const std::vector<std::int32_t> ids = choose(t);
      batch.replay.insert(batch.replay.end(), ids.begin(), ids.end());
    }
    eager.upload(batch), eager.step();
    captured.upload(batch);
    if (replay == 0) captured.step(), captured.capture(), captured.upload(batch);
    captured.replay();
    const bool overflows = replay % 6 == 3;
    expect_same_bits(eager.result(), captured.result(), fmt::format("replay {}", replay));
    const DeviceMoeReport report = captured.report(0);
    EXPECT_EQ(report.valid, overflows ? 0 : 1) << replay;
    EXPECT_EQ(report.slots, overflows || replay % 6 == 4 ? 0 : (replay % 6 == 2 ? 128 : 256)) << replay;
    if (replay % 6 == 4) {
      EXPECT_EQ(report.rows, 0);
    }
    const StatusWord status = captured.status(0);
    EXPECT_EQ(status.overflowed(), overflows) << replay;
    if (!overflows) continue;
    EXPECT_EQ(status.slot_demand, 512);
    EXPECT_EQ(status.slot_capacity, 300);
    EXPECT_EQ(status.row_demand, 128);
    EXPECT_EQ(status.row_capacity, 128);
    eager.clear_status(), captured.clear_status();
  }
}

}  // namespace
}  // namespace waybill::cuda
