// SPDX-License-Identifier: Apache-2.0
// A MoE layer on the mpi engine: forward and backward of this process's rank equal those of rank threads to the bit, whatever the
// shared expert overlaps with.
#include <gtest/gtest.h>

#include "fabric/mpi/world.h"
#include "moe/harness.h"

namespace waybill {
namespace {

using namespace test;
using waybill::testing::g_world;

MoeConfig small_config(bool latent) {
  MoeConfig config;
  config.H = 24;
  config.E = 2 * g_world->size();
  config.K = 3;
  config.F = 10;
  config.shared_F = 14;
  config.latent = latent ? 12 : 0;
  config.aux_coefficient = 0.02f;
  config.z_coefficient = 0.001f;
  return config;
}

std::vector<std::int64_t> ragged_tokens() {
  std::vector<std::int64_t> tokens;
  for (int p = 0; p < g_world->size(); ++p) tokens.push_back(p == 1 ? 0 : 9 + p * 7 % 20);
  return tokens;
}

std::vector<std::vector<float>> results_of(RankRun& run) {
  std::vector<std::vector<float>> all = {run.out, run.dx};
  run.gradients.w.for_each([&](const char*, std::vector<float>& v) { all.push_back(v); });
  return all;
}

std::vector<std::vector<float>> on_fabric(Fabric& fabric, const MoeConfig& config, const Weights<float>& weights, const Batch& batch) {
  RankRun run(config, fabric.size(), fabric.rank(), weights, batch);
  MoeLayer layer(config, fabric, fabric);
  run.run(layer, config, batch, {});
  return results_of(run);
}

void expect_same(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size()) << "result " << i;
    EXPECT_TRUE(a[i].empty() || std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) == 0) << "result " << i << " differs";
  }
}

TEST(MpiMoe, ForwardAndBackwardEqualThreadsWithAndWithoutOverlap) {
  for (const bool latent : {false, true}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kLayer}) {
      MoeConfig config = small_config(latent);
      config.recompute = recompute;
      config.overlap_shared = false;
      const Weights<float> weights = random_weights(config, 5);
      const Batch batch = random_batch(config, ragged_tokens(), 6);
      std::vector<std::vector<float>> threads;
      run_ranks(g_world->size(), [&](Fabric& fabric) {
        const auto results = on_fabric(fabric, config, weights, batch);
        if (fabric.rank() == g_world->rank()) threads = results;
      });
      for (const bool overlap : {false, true}) {
        config.overlap_shared = overlap;
        expect_same(on_fabric(*g_world, config, weights, batch), threads);
      }
    }
  }
}

TEST(MpiMoe, TwoLevelEqualsThreadsOnTheSameNodes) {
  const int ranks_per_node = std::max(1, g_world->size() / 2);
  const auto world = make_mpi_fabric({.fabric = {.timeout = std::chrono::milliseconds(20000), .ranks_per_node = ranks_per_node}});
  MoeConfig config = small_config(false);
  config.hierarchy = Hierarchy::kTwoLevel;
  config.combine_wire = CombineWire::kBF16;
  const Weights<float> weights = random_weights(config, 7);
  const Batch batch = random_batch(config, ragged_tokens(), 8);
  std::vector<std::vector<float>> threads;
  run_ranks(
      g_world->size(),
      [&](Fabric& fabric) {
        const auto results = on_fabric(fabric, config, weights, batch);
        if (fabric.rank() == g_world->rank()) threads = results;
      },
      FabricOptions{.ranks_per_node = ranks_per_node});
  expect_same(on_fabric(*world, config, weights, batch), threads);
}

}  // namespace
}  // namespace waybill
