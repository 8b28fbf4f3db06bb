// SPDX-License-Identifier: Apache-2.0
// The two-level exchange of GPUs on virtual nodes of one process: the bits of the CPU engine's.
#include <gmock/gmock.h>

#include <thread>

#include "cuda/node_harness.h"

namespace waybill::cuda {
namespace {

struct Layout {
  int nodes, per_node;
};
class NodeExchangeCuda : public ::testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Nodes, NodeExchangeCuda, ::testing::Values(Layout{1, 2}, Layout{2, 1}, Layout{2, 2}, Layout{3, 2}, Layout{2, 4}));

TEST_P(NodeExchangeCuda, EqualsTheTwoLevelCpuEngineToTheBit) {
  WB_NEEDS_GPU();
  const auto [nodes, per_node] = GetParam();
  const int P = nodes * per_node;
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    std::vector<ts::Group> groups;
    std::vector<std::vector<ts::RankResult>> want;
    ExchangeConfig config = two_level_group(P, 1).config();
    config.T_max = kNodeTokens, config.combine_wire = wire;
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      groups.push_back(two_level_group(P, seed));
      want.push_back(run_two_level_on_cpu(groups.back(), config, per_node));
    }
    LocalRails rails(nodes, per_node, 0);
    const auto run_node = [&](int n) {
      WB_TRY_CUDA(cudaSetDevice(0));
      LocalRails::Node rail(rails, n);
      const std::vector<int> devices{0};
      CudaLocalGroup group(per_node, devices, std::size_t{64} << 20);
      NodeGpu gpu(
          config, rail, local_ranks(group, 0), 0, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); },
          [&](int index, std::uint64_t offset) { return group.at<void>(index, offset); });
      for (std::size_t s = 0; s < groups.size(); ++s) {
        for (int g = 0; g < per_node; ++g) gpu.upload(static_cast<std::size_t>(g), groups[s], n * per_node + g);
        gpu.queue(gpu.stream());
        for (int g = 0; g < per_node; ++g) {
          const ts::RankResult& expected = want[s][static_cast<std::size_t>(n * per_node + g)];
          const auto i = static_cast<std::size_t>(g);
          EXPECT_EQ(gpu.out(i), expected.out) << "node " << n << ", rank " << g << ", step " << s;
          EXPECT_EQ(gpu.d_weights(i), expected.d_weights) << "node " << n << ", rank " << g << ", step " << s;
          EXPECT_EQ(gpu.rows(i), expected.handle.layout.R());
          EXPECT_EQ(gpu.status(i).flags, 0u);
        }
      }
      EXPECT_EQ(group.first_error(), "");
    };
    std::vector<std::thread> threads;
    for (int n = 0; n < nodes; ++n) threads.emplace_back(run_node, n);
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
  }
}

TEST(NodeExchangeRefusals, UnequalExpertsAndWideRoutesAreNamed) {
  ExchangeConfig config;
  config.H = 64, config.E = 12, config.K = 4, config.T_max = 8;
  EXPECT_EQ(node_config(config, 3).E, 4);
  EXPECT_EQ(node_config(config, 3).T_max, 24);
  EXPECT_THROW((void)node_config(config, 5), Error);
  config.K = 5;
  try {
    (void)node_config(config, 3);
    FAIL() << "more experts a token than a node has";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("E / nodes = 4 experts a token, got K = 5"));
  }
}

}  // namespace
}  // namespace waybill::cuda
