// SPDX-License-Identifier: Apache-2.0
// The exchange on the mpi engine. Every process computes the whole group's step on the threads engine, from the same seeds, and its
// own rank's part over MPI: both must agree to the bit, bytes and refusals included.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "exchange/group.h"
#include "fabric/mpi/world.h"

namespace waybill {
namespace {

using namespace testing_support;
using waybill::testing::g_world;

std::size_t my_rank() { return static_cast<std::size_t>(g_world->rank()); }

std::vector<std::int64_t> ragged(std::int64_t step = 0) {
  std::vector<std::int64_t> T;
  for (int p = 0; p < g_world->size(); ++p) T.push_back(p == 1 ? 0 : (p * 37 + 20 + step * 11) % 61);
  return T;
}
std::int64_t num_experts(std::int64_t L) { return L * g_world->size(); }

void expect_same(const RankResult& mpi, const RankResult& threads) {
  EXPECT_EQ(mpi.handle.valid, threads.handle.valid);
  EXPECT_EQ(mpi.handle.max_slot_demand, threads.handle.max_slot_demand);
  EXPECT_EQ(mpi.handle.layout.row_offsets, threads.handle.layout.row_offsets);
  EXPECT_EQ(mpi.handle.layout.expert_offsets, threads.handle.layout.expert_offsets);
  EXPECT_EQ(mpi.handle.layout.slot_row, threads.handle.layout.slot_row);
  EXPECT_TRUE(same_bits(mpi.handle.layout.slot_weight, threads.handle.layout.slot_weight));
  EXPECT_TRUE(same_bits(mpi.rows, threads.rows));
  EXPECT_TRUE(same_bits(mpi.z, threads.z));
  EXPECT_TRUE(same_bits(mpi.out, threads.out));
  EXPECT_TRUE(same_bits(mpi.d_weights, threads.d_weights));
  EXPECT_EQ(mpi.status.flags, threads.status.flags);
  EXPECT_EQ(mpi.status.slot_demand, threads.status.slot_demand);
  EXPECT_EQ(mpi.status.num_bad_ids, threads.status.num_bad_ids);
  EXPECT_EQ(mpi.bytes.total(), threads.bytes.total());
  EXPECT_EQ(mpi.bytes.payload, threads.bytes.payload);
  EXPECT_EQ(mpi.bytes.combined, threads.bytes.combined);
  EXPECT_EQ(mpi.bytes.rows, threads.bytes.rows);
  EXPECT_EQ(mpi.bytes.rows_between_nodes, threads.bytes.rows_between_nodes);
}

void expect_equal_to_threads(Fabric& world, const Group& group, const ExchangeConfig& config, const RunOptions& options = {}) {
  const RankResult threads = std::move(run_group(group, config, options)[my_rank()]);
  Exchange exchange(config, group.placement, world, options.pool);
  expect_same(run_rank(exchange, group, my_rank(), options), threads);
}

TEST(MpiExchange, RaggedAndEmptyRanksEqualThreads) {
  ThreadPool pool(2);
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    for (const std::int64_t alignment : {1, 8}) {
      const Group group = random_group(ragged(), 5, num_experts(6), 19, {.seed = 3, .drop = 0.2}, false);
      ExchangeConfig config = group.config();
      config.combine_wire = wire;
      config.alignment = alignment;
      config.debug_checks = alignment == 1;
      expect_equal_to_threads(*g_world, group, config, {.weighted = true, .pool = alignment == 8 ? &pool : nullptr});
      expect_equal_to_threads(*g_world, group, config, {.x_dtype = DType::kBF16, .out_dtype = DType::kBF16});
    }
  }
}

TEST(MpiExchange, OddRoutesEqualThreads) {
  const std::int64_t E = num_experts(3), L = 3;
  for (const std::int64_t target : {std::int64_t{0}, E - L}) {  // everything to one rank
    const Group group = random_group(ragged(), 2, E, 6, {.seed = 4, .first_expert = target, .num_experts = L, .unit_weights = true}, true);
    expect_equal_to_threads(*g_world, group, group.config());
  }
  expect_equal_to_threads(*g_world, random_group(ragged(), 3, E, 4, {.seed = 5, .drop = 1.0}, true),
                          random_group(ragged(), 3, E, 4, {.seed = 5}, true).config());
  const std::vector<std::int64_t> nothing(static_cast<std::size_t>(g_world->size()), 0);
  const Group empty = random_group(nothing, 2, E, 5, {.seed = 6}, true);
  expect_equal_to_threads(*g_world, empty, empty.config());
  const Group all = random_group(ragged(), E, E, 3, {.seed = 7}, false);  // K = E
  expect_equal_to_threads(*g_world, all, all.config(), {.weighted = true});
}

TEST(MpiExchange, TwoLevelOnEveryBoundaryEqualsThreads) {
  const int P = g_world->size();
  for (const int ranks_per_node : {1, 2, 3, P / 2, P}) {
    if (ranks_per_node > P) continue;
    const auto world = make_mpi_fabric({.fabric = {.timeout = std::chrono::milliseconds(20000), .ranks_per_node = ranks_per_node}});
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      const Group group = random_group(ragged(), 5, num_experts(4), 11, {.seed = 8, .drop = 0.1}, false);
      ExchangeConfig config = group.config();
      config.hierarchy = Hierarchy::kTwoLevel;
      config.combine_wire = wire;
      expect_equal_to_threads(*world, group, config, {.weighted = true, .ranks_per_node = ranks_per_node});
    }
  }
}

TEST(MpiExchange, BudgetsAndOverflowEqualThreads) {
  for (const double factor : {0.0, 1.0, 1.5, 8.0}) {
    const Group group = random_group(ragged(), 4, num_experts(4), 6, {.seed = 9, .num_experts = 8}, false);
    ExchangeConfig config = group.config();
    config.mode = ExchangeMode::kCaptured;
    config.T_max = 61;
    config.receive_factor = factor;
    expect_equal_to_threads(*g_world, group, config);
  }
}

TEST(MpiExchange, OneExchangeServesManySteps) {
  ExchangeConfig config;
  config.H = 7;
  config.E = num_experts(5);
  config.K = 3;
  Exchange exchange(config, block_placement(config.E, g_world->size()), *g_world);
  for (std::int64_t step = 0; step < 12; ++step) {
    const Group group = random_group(ragged(step), 3, config.E, 7, {.seed = 100 + static_cast<std::uint64_t>(step), .drop = 0.3}, false);
    exchange.reset_bytes();
    expect_same(run_rank(exchange, group, my_rank(), {.weighted = true}), run_group(group, config, {.weighted = true})[my_rank()]);
  }
}

std::string text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(MpiExchange, RefusalsAreTheSameTextOnEveryRankAsWithThreads) {
  const auto bad_ids = [](Fabric& fabric) {
    ExchangeConfig config;
    config.H = 8;
    config.E = 2 * fabric.size();
    config.K = 2;
    config.debug_checks = true;
    Exchange exchange(config, block_placement(config.E, fabric.size()), fabric);
    Route route = random_route(3, 2, config.E, {.seed = 2});
    if (fabric.rank() == 1) route.view().set_id(2, 1, -7);
    exchange.plan(route);
  };
  const auto other_config = [](Fabric& fabric) {
    ExchangeConfig config;
    config.H = fabric.rank() == 1 ? 9 : 8;
    config.E = fabric.size();
    config.K = 1;
    Exchange exchange(config, block_placement(config.E, fabric.size()), fabric);
  };
  for (const std::function<void(Fabric&)>& body : std::vector<std::function<void(Fabric&)>>{bad_ids, other_config}) {
    const auto group = g_world->split(0, 0, "refusal");
    const std::string text = text_of([&] { body(*group); });
    EXPECT_FALSE(text.empty());
    EXPECT_EQ(text, errors_of_ranks(g_world->size(), body)[my_rank()]);
    group->barrier("a refusal leaves the group usable");
  }
}

// Rank 0 makes no call between the halves until all peers have finished theirs, which they can only do with its rows: the progress
// thread moved them. Peers say so through files, not through MPI.
TEST(MpiExchange, RowsOfARankThatComputesMove) {
  const std::int64_t H = 4096, T = 200;  // 3.3 MB a rank: far above the eager limit of the transport
  const Group group = random_group(std::vector<std::int64_t>(static_cast<std::size_t>(g_world->size()), T), 4, num_experts(4), H, {.seed = 1}, false);
  Exchange exchange(group.config(), group.placement, *g_world);
  const DispatchHandle handle = exchange.plan(group.routes[my_rank()]);
  const auto path = [](int rank) { return std::filesystem::temp_directory_path() / fmt::format("waybill_mpi_moved_{}_{}", getppid(), rank); };
  std::filesystem::remove(path(g_world->rank()));
  g_world->barrier("no old files");
  Tensor rows;
  PendingRows pending = exchange.dispatch_start(handle, to_tensor(group.x[my_rank()], T, H, DType::kF32), rows);
  if (g_world->rank() == 0) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(15);
    int finished = 0;
    while (finished < g_world->size() - 1 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      finished = 0;
      for (int p = 1; p < g_world->size(); ++p) finished += std::filesystem::exists(path(p)) ? 1 : 0;
    }
    EXPECT_EQ(finished, g_world->size() - 1) << "the peers waited for rank 0 to call finish()";
  }
  pending.finish();
  if (g_world->rank() != 0) std::ofstream(path(g_world->rank())) << "done";
  EXPECT_TRUE(same_bits(to_floats(rows), reference::received_rows(group.views(), g_world->rank(), group.x_pointers(), H)));
  g_world->barrier("all have finished");
  std::filesystem::remove(path(g_world->rank()));
}

}  // namespace
}  // namespace waybill
