// SPDX-License-Identifier: Apache-2.0
// The two-level exchange of GPUs on virtual nodes of one process: the bits of the CPU engine's.
#include "exchange/cuda/node_exchange.h"

#include <gmock/gmock.h>

#include <algorithm>
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

TEST_P(NodeExchangeCuda, AnExceededBudgetIsToldToEveryNode) {
  WB_NEEDS_GPU();
  const auto [nodes, per_node] = GetParam();
  const int P = nodes * per_node;
  const ts::Group spread = two_level_group(P, 1);
  ts::Group full = two_level_group(P, 1);  // all routes to the first rank
  for (std::size_t p = 0; p < full.routes.size(); ++p) {
    full.routes[p] = ts::random_route(full.routes[p].view().T, 5, 16 * P, ts::RandomRoute{.seed = p, .num_experts = 16});
  }
  ExchangeConfig config = spread.config();
  config.T_max = kNodeTokens, config.mode = ExchangeMode::kCaptured, config.receive_factor = 1.6;
  const std::vector<ts::RankResult> want = run_two_level_on_cpu(spread, config, per_node);
  LocalRails rails(nodes, per_node, 0);
  const auto run_node = [&](int n) {
    WB_TRY_CUDA(cudaSetDevice(0));
    LocalRails::Node rail(rails, n);
    const std::vector<int> devices{0};
    CudaLocalGroup group(per_node, devices, std::size_t{64} << 20);
    NodeGpu gpu(
        config, rail, local_ranks(group, 0), 0, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); },
        [&](int index, std::uint64_t offset) { return group.at<void>(index, offset); });
    for (const bool fits : {true, false, true}) {
      for (int g = 0; g < per_node; ++g) gpu.upload(static_cast<std::size_t>(g), fits ? spread : full, n * per_node + g);
      gpu.queue(gpu.stream());
      for (int g = 0; g < per_node; ++g) {
        const auto i = static_cast<std::size_t>(g);
        const int rank = n * per_node + g;
        const std::string what = fmt::format("rank {}, {}", rank, fits ? "fits" : "exceeded");
        EXPECT_EQ(gpu.is_valid(i), fits) << what;
        if (fits) {
          EXPECT_EQ(gpu.out(i), want[static_cast<std::size_t>(rank)].out) << what;
          continue;
        }
        EXPECT_EQ(gpu.rows(i), 0) << what;
        EXPECT_THAT(gpu.out(i), ::testing::Each(0.0f)) << what;
        EXPECT_THAT(gpu.d_weights(i), ::testing::Each(0.0f)) << what;
        EXPECT_EQ((gpu.status(i).flags & kStatusSlotOverflow) != 0, rank == 0) << what;
      }
    }
    EXPECT_EQ(group.first_error(), "");
  };
  std::vector<std::thread> threads;
  for (int n = 0; n < nodes; ++n) threads.emplace_back(run_node, n);
  for (std::thread& thread : threads) thread.join();
}

// What NcclWorld does to a rank whose group has lost another, without a loss: the poison of node 1's rank.
TEST(NodeExchangeLost, AStepOfARankThatWasPoisonedIsInvalidAndHasNoResults) {
  WB_NEEDS_GPU();
  const ts::Group routes = two_level_group(2, 1);
  ExchangeConfig config = routes.config();
  config.T_max = kNodeTokens;
  LocalRails rails(2, 1, 0);
  const auto run_node = [&](int n) {
    WB_TRY_CUDA(cudaSetDevice(0));
    LocalRails::Node rail(rails, n);
    const std::vector<int> devices{0};
    CudaLocalGroup group(1, devices, std::size_t{64} << 20);
    NodeGpu gpu(
        config, rail, local_ranks(group, 0), 0, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); },
        [&](int index, std::uint64_t offset) { return group.at<void>(index, offset); });
    for (const bool poisoned : {false, true}) {
      if (poisoned && n == 1) WB_TRY_CUDA(cudaMemset(&group.at<DeviceControl>(0, 0)->poison, 1, sizeof(std::uint32_t)));
      gpu.upload(0, routes, n);
      gpu.queue(gpu.stream());
      const ts::Floats out = gpu.out(0), d_weights = gpu.d_weights(0);
      const bool is_empty = std::ranges::all_of(out, [](float x) { return x == 0; }) && std::ranges::all_of(d_weights, [](float x) { return x == 0; });
      const bool is_lost = poisoned && n == 1;
      EXPECT_EQ(is_empty, is_lost) << "node " << n;
      EXPECT_EQ(gpu.is_valid(0), !is_lost) << "node " << n;
      EXPECT_EQ(gpu.status(0).flags, is_lost ? kStatusTimeout : kStatusOk) << "node " << n;
      EXPECT_EQ(describe(gpu.status(0)), is_lost ? "the group has lost a rank" : "ok") << "node " << n;
    }
  };
  std::thread other(run_node, 1);
  run_node(0);
  other.join();
}

TEST(NodeExchangeSizes, BudgetsAreThoseOfOneDomain) {
  for (const int N : {1, 2, 3, 5, 7}) {
    for (const int G : {1, 2, 4}) {
      for (const std::int64_t T : {1, 7, 100, 4096}) {
        for (const double factor : {0.0, 0.3, 1.0, 1.1, 1.5, 3.7, 100.0}) {
          ExchangeConfig c;
          c.H = 64, c.E = 8 * N * G, c.K = 7, c.T_max = T, c.mode = ExchangeMode::kCaptured, c.receive_factor = factor, c.alignment = 4,
          c.hierarchy = Hierarchy::kAuto;
          const ReceiveBudget flat = receive_budget(c, N * G), inside = receive_budget(windows_config(c, {N * G, N}), G);
          const std::string what = fmt::format("{} nodes of {}, T_max {}, factor {}", N, G, T, factor);
          EXPECT_EQ(inside.slots, flat.slots) << what;
          EXPECT_EQ(inside.rows, flat.rows) << what;
          EXPECT_EQ(inside.padded_slots, flat.padded_slots) << what;
        }
      }
    }
  }
}

TEST(NodeExchangeRefusals, WhatGoesWithinOneDomainOnly) {
  WB_NEEDS_GPU();
  ExchangeConfig config;
  config.H = 64, config.E = 16, config.K = 4, config.T_max = 8, config.hierarchy = Hierarchy::kTwoLevel;
  LocalRails rails(2, 1, 0);
  LocalRails::Node rail(rails, 0);
  const std::vector<int> devices{0};
  CudaLocalGroup group(1, devices, std::size_t{8} << 20);
  const ExchangeConfig inside = windows_config(config, {2, 2});
  const auto book = [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); };
  const ExchangeWindows windows = book_exchange_windows(inside, 1, book);
  const auto refusal = [](const std::function<void()>& call) -> std::string {
    try {
      call();
      return "";
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUnsupported ? error.what() : std::string("another code: ") + error.what();
    }
  };
  using ::testing::HasSubstr;
  const auto made = make_exchange(config, block_placement(16, 2), &rail, local_ranks(group, 0), 0, windows);
  const DeviceHandle handle = made->make_handle();
  const DeviceBuffer memory(1 << 16, 0);
  const DeviceRows rows[] = {{memory.data(), 0}};
  EXPECT_EQ(made->num_nodes(), 2);
  EXPECT_FALSE(made->supports_chunks());
  EXPECT_THAT(refusal([&] { made->dispatch_chunks(handle, DType::kBF16, rows, 0, true, nullptr); }),
              HasSubstr("dispatch_chunks() goes within one NVLink domain"));
  EXPECT_THAT(refusal([&] { made->permute_arriving(handle, DType::kBF16, rows, rows, rows, nullptr); }), HasSubstr("permute_arriving()"));
  EXPECT_THAT(refusal([&] { made->permute_own(handle, DType::kBF16, rows, rows, nullptr); }), HasSubstr("permute_own()"));
  EXPECT_THAT(refusal([&] { made->dispatch_pull(handle, DType::kBF16, 0, 0, nullptr); }), HasSubstr("dispatch_pull()"));
  EXPECT_THAT(refusal([&] { made->combine_push(handle, 0, 0, DType::kBF16, rows, nullptr); }), HasSubstr("combine_push()"));
  const DeviceExchange::Scales scales{rows, 16, 0};
  EXPECT_THAT(refusal([&] { made->dispatch(handle, DType::kF8E4M3, rows, 0, scales, true, nullptr); }), HasSubstr("rows with scales"));
  const std::vector<std::int32_t> table(16, 0);
  EXPECT_THAT(refusal([&] {
                (void)make_exchange(config, {16, 2, table.data(), table.data()}, &rail, local_ranks(group, 0), 0, windows);
              }),
              HasSubstr("consecutive experts a rank"));
  EXPECT_THAT(refusal([&] {
                (void)make_exchange(config, block_placement(16, 2), &rail, local_ranks(group, 0), 0, windows, {}, {true, 0});
              }),
              HasSubstr("plans from dense maps"));
  config.hierarchy = Hierarchy::kFlat;
  EXPECT_THROW((void)make_exchange(config, block_placement(16, 2), &rail, local_ranks(group, 0), 0, windows), Error);
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
