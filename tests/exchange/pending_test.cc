// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine in two halves: the same bits, and rows move while the caller computes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "exchange/group.h"

namespace waybill {
namespace {

using namespace testing_support;
using testing::HasSubstr;

TEST(Pending, TwoHalvesGiveTheBitsOfOneCall) {
  const Group group = random_group({20, 0, 33, 7}, 4, 16, 9, {.seed = 31, .drop = 0.1}, false);
  for (const Hierarchy hierarchy : {Hierarchy::kFlat, Hierarchy::kTwoLevel}) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      ExchangeConfig config = group.config();
      config.hierarchy = hierarchy;
      config.combine_wire = wire;
      const auto expected = run_group(group, config, {.ranks_per_node = 2});
      run_ranks(
          4,
          [&](Fabric& fabric) {
            const auto p = static_cast<std::size_t>(fabric.rank());
            Exchange exchange(config, group.placement, fabric);
            const std::int64_t T = group.routes[p].T();
            const DispatchHandle handle = exchange.plan(group.routes[p]);
            Tensor x = to_tensor(group.x[p], T, 9, DType::kF32), rows;
            PhaseTimes times;
            PendingRows pending = exchange.dispatch_start(handle, x, rows, &times);
            std::fill_n(x.as<float>(), x.size(), -1.0f);  // x is free at once
            PendingRows moved = std::move(pending);
            pending.finish();  // nothing
            moved.finish(&times);
            moved.finish(&times);
            EXPECT_TRUE(same_bits(to_floats(rows), expected[p].rows));
            EXPECT_GT(times.seconds[static_cast<std::size_t>(Phase::kDispatch)], 0);
            Tensor z = to_tensor(expected[p].z, handle.layout.R(), 9, DType::kF32), out(DType::kF32, {T, 9});
            { const PendingRows dropped = exchange.combine_start(handle, z, out, &times); }  // the end of its life finishes it
            EXPECT_TRUE(same_bits(to_floats(out), expected[p].out));
            EXPECT_EQ(exchange.bytes().combined, expected[p].bytes.combined);
            EXPECT_EQ(exchange.bytes().payload, expected[p].bytes.payload);
          },
          FabricOptions{.ranks_per_node = 2});
    }
  }
}

TEST(Pending, NoOtherCallMayComeBetween) {
  const Group group = random_group({4, 4}, 2, 4, 3, {.seed = 1}, true);
  run_ranks(2, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(group.config(), group.placement, fabric);
    const DispatchHandle handle = exchange.plan(group.routes[p]);
    Tensor rows, more;
    const Tensor x = to_tensor(group.x[p], 4, 3, DType::kF32);
    PendingRows pending = exchange.dispatch_start(handle, x, rows);
    for (const auto& call : std::vector<std::function<void()>>{[&] { exchange.plan(group.routes[p]); }, [&] { exchange.dispatch(handle, x, more); }}) {
      try {
        call();
        ADD_FAILURE() << "not refused";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("on its way; finish() it first"));
      }
    }
    pending.finish();
    exchange.dispatch(handle, x, more);
    EXPECT_TRUE(same_bits(to_floats(rows), to_floats(more)));
  });
}

// Rank 0 computes between the halves while the others finish: they take its rows and push theirs without it.
TEST(Pending, ThreadsMoveTheRowsOfARankThatComputes) {
  const Group group = random_group({50, 50, 50}, 3, 6, 8, {.seed = 9, .unit_weights = true}, true);
  const auto expected = run_group(group, group.config());
  std::atomic<int> finished{0};
  run_ranks(3, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    Exchange exchange(group.config(), group.placement, fabric);
    const DispatchHandle handle = exchange.plan(group.routes[p]);
    Tensor rows;
    PendingRows pending = exchange.dispatch_start(handle, to_tensor(group.x[p], 50, 8, DType::kF32), rows);
    if (p == 0) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (finished < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(finished, 2) << "the peers waited for rank 0 to call finish()";
      // Its own incoming rows have been pushed, too (those from itself were copied at the start).
      EXPECT_TRUE(same_bits(to_floats(rows), expected[p].rows));
    }
    pending.finish();
    ++finished;
    EXPECT_TRUE(same_bits(to_floats(rows), expected[p].rows));
  });
}

TEST(Pending, AnExceptionBetweenTheHalvesWithdraws) {
  const Group group = random_group({4, 4}, 2, 4, 3, {.seed = 1}, true);
  try {
    run_ranks(2, [&](Fabric& fabric) {
      const auto p = static_cast<std::size_t>(fabric.rank());
      Exchange exchange(group.config(), group.placement, fabric);
      const DispatchHandle handle = exchange.plan(group.routes[p]);
      Tensor rows;
      PendingRows pending = exchange.dispatch_start(handle, to_tensor(group.x[p], 4, 3, DType::kF32), rows);
      if (p == 1) throw std::runtime_error("the shared expert failed");
      pending.finish();
      fabric.barrier("after");
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1: the shared expert failed"));
  }
}

}  // namespace
}  // namespace waybill
