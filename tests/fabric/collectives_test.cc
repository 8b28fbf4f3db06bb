// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "fabric/engine.h"
#include "waybill/random.h"

namespace waybill {
namespace {

const int kSizes[] = {1, 2, 3, 4, 8, 17, 72};

// Ranks that are threads of one process can count together.
bool engine_shares_memory() { return std::strcmp(engine_name(), "mpi") != 0; }

TEST(Fabric, RunRanksGivesEachRankItsNumberOnce) {
  for (const int P : kSizes) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(P));
    run_engine(P, [&](Fabric& fabric) {
      EXPECT_EQ(fabric.size(), P);
      EXPECT_STREQ(fabric.engine(), engine_name());
      EXPECT_EQ(fabric.topology().node_of.size(), static_cast<std::size_t>(P));
      ++seen[static_cast<std::size_t>(fabric.rank())];
      std::vector<int> ranks(static_cast<std::size_t>(P));
      const int mine = fabric.rank();
      fabric.all_gather(&mine, ranks.data(), sizeof mine, "ranks");
      for (int p = 0; p < P; ++p) EXPECT_EQ(ranks[static_cast<std::size_t>(p)], p);
    });
    if (!engine_shares_memory()) continue;
    for (const auto& count : seen) EXPECT_EQ(count.load(), 1);
  }
}

TEST(Fabric, NobodyPassesABarrierBeforeTheLastHasCome) {
  if (!engine_shares_memory()) GTEST_SKIP() << "the ranks need a counter in common";
  for (const int P : kSizes) {
    std::atomic<int> arrived{0};
    run_engine(P, [&](Fabric& fabric) {
      for (int round = 1; round <= 5; ++round) {
        ++arrived;
        fabric.barrier("in");
        EXPECT_EQ(arrived.load(), round * P);
        fabric.barrier("out");
      }
    });
  }
}

TEST(Fabric, AllGatherIsInRankOrderForSmallAndLargeMessages) {
  for (const int P : kSizes) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{5000}}) {  // 5000 int64 pass 16 KiB
      if (P == 72 && count == 5000) continue;                                                                 // 200 MB in all
      run_engine(P, [&](Fabric& fabric) {
        std::vector<std::int64_t> mine(count), all(count * static_cast<std::size_t>(P), -1);
        for (std::size_t i = 0; i < count; ++i) mine[i] = fabric.rank() * 100000 + static_cast<std::int64_t>(i);
        fabric.all_gather(mine.data(), all.data(), count * sizeof(std::int64_t), "gather");
        for (std::size_t i = 0; i < all.size(); ++i) {
          ASSERT_EQ(all[i], static_cast<std::int64_t>(i / count) * 100000 + static_cast<std::int64_t>(i % count));
        }
      });
    }
  }
}

// Rank a sends (a * 7 + b * 3) % 5 * 1000 values to rank b: zero sizes, own rank and uneven sizes included.
std::size_t ragged(int from, int to) { return static_cast<std::size_t>((from * 7 + to * 3) % 5) * 1000; }

struct Ragged {
  std::vector<std::vector<std::int32_t>> send, receive;
  std::vector<Fabric::Span> send_spans, receive_spans;
  explicit Ragged(const Fabric& fabric, int tag) {
    for (int p = 0; p < fabric.size(); ++p) {
      send.emplace_back(ragged(fabric.rank(), p));
      for (std::size_t i = 0; i < send.back().size(); ++i) send.back()[i] = tag + fabric.rank() * 1000000 + p * 10000 + static_cast<std::int32_t>(i);
      receive.emplace_back(ragged(p, fabric.rank()), -1);
    }
    for (auto& buffer : send) send_spans.push_back({buffer.data(), buffer.size() * sizeof(std::int32_t)});
    for (auto& buffer : receive) receive_spans.push_back({buffer.data(), buffer.size() * sizeof(std::int32_t)});
  }
  void check(const Fabric& fabric, int tag) const {
    for (int p = 0; p < fabric.size(); ++p) {
      const auto& buffer = receive[static_cast<std::size_t>(p)];
      for (std::size_t i = 0; i < buffer.size(); ++i) ASSERT_EQ(buffer[i], tag + p * 1000000 + fabric.rank() * 10000 + static_cast<std::int32_t>(i));
    }
  }
};

TEST(Fabric, AllToAllMovesRaggedMessages) {
  for (const int P : {1, 2, 3, 4, 8, 72}) {
    run_engine(P, [&](Fabric& fabric) {
      Ragged data(fabric, 0);
      fabric.all_to_all(data.send_spans, data.receive_spans, "ragged");
      data.check(fabric, 0);
    });
  }
}

TEST(Fabric, PendingExchangesMayBeWaitedForInAnyOrder) {
  run_engine(4, [&](Fabric& fabric) {
    for (int round = 0; round < 20; ++round) {
      Ragged a(fabric, 1), b(fabric, 2), c(fabric, 3);
      auto wait_a = fabric.all_to_all_start(a.send_spans, a.receive_spans, "a");
      auto wait_b = fabric.all_to_all_start(b.send_spans, b.receive_spans, "b");
      fabric.barrier("between");
      auto wait_c = fabric.all_to_all_start(c.send_spans, c.receive_spans, "c");
      if (fabric.rank() % 2 == 0) {
        wait_c->wait();
        wait_a->wait();
        wait_b->wait();
        wait_b->wait();  // a second wait is a no-op
      } else {
        wait_b->wait();
        wait_c->wait();
        wait_a.reset();  // destroying waits
      }
      if (wait_a) a.check(fabric, 1);
      b.check(fabric, 2);
      c.check(fabric, 3);
    }
  });
}

TEST(Fabric, SendBuffersMayBeReusedRightAfterTheWait) {
  run_engine(3, [&](Fabric& fabric) {
    std::vector<std::int32_t> send(30000), receive(30000);
    for (int round = 0; round < 50; ++round) {
      std::fill(send.begin(), send.end(), fabric.rank() * 1000 + round);
      std::vector<Fabric::Span> from, to;
      for (std::size_t p = 0; p < 3; ++p) {
        from.push_back({send.data() + p * 10000, 40000});
        to.push_back({receive.data() + p * 10000, 40000});
      }
      fabric.all_to_all(from, to, "reuse");
      for (std::size_t i = 0; i < receive.size(); i += 999) ASSERT_EQ(receive[i], static_cast<int>(i / 10000) * 1000 + round);
    }
  });
}

// The sum of an element is ((x0 + x1) + x2) + ... whatever the size of the call, on every rank and repeat.
TEST(Fabric, AllReduceAddsInRankOrderBitForBit) {
  for (const int P : {1, 2, 3, 4, 7}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{4097}, std::size_t{20011}, std::size_t{1100000}}) {
      std::vector<float> expected(count);
      const auto value = [](int rank, std::size_t i) { return random_normal(static_cast<std::uint64_t>(rank), i) * std::exp2(static_cast<float>(i % 30)); };
      if (count == 1100000 && P > 2) continue;
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = value(0, i);
        for (int p = 1; p < P; ++p) expected[i] += value(p, i);
      }
      run_engine(P, [&](Fabric& fabric) {
        std::vector<float> values(count);
        for (std::size_t i = 0; i < count; ++i) values[i] = value(fabric.rank(), i);
        fabric.all_reduce(std::span<float>(values), ReduceOp::kSum, "sum");
        EXPECT_TRUE(count == 0 || std::memcmp(values.data(), expected.data(), count * sizeof(float)) == 0);
      });
    }
  }
}

TEST(Fabric, AllReduceKnowsMaxMinAndItsTypes) {
  run_engine(5, [&](Fabric& fabric) {
    const int r = fabric.rank();
    std::vector<std::int64_t> ints = {r, -r, (std::int64_t{1} << 40) + r};
    fabric.all_reduce(std::span<std::int64_t>(ints), ReduceOp::kMax, "max");
    EXPECT_EQ(ints, (std::vector<std::int64_t>{4, 0, (std::int64_t{1} << 40) + 4}));
    std::vector<double> doubles = {1.0 / (r + 1), 7.0};
    fabric.all_reduce(std::span<double>(doubles), ReduceOp::kMin, "min");
    EXPECT_EQ(doubles, (std::vector<double>{0.2, 7.0}));
    std::vector<std::int64_t> sums(3000, r);
    fabric.all_reduce(std::span<std::int64_t>(sums), ReduceOp::kSum, "sum");
    for (const std::int64_t sum : sums) ASSERT_EQ(sum, 10);
  });
}

TEST(Fabric, BroadcastReachesEveryRankFromAnyRoot) {
  run_engine(4, [&](Fabric& fabric) {
    for (int root = 0; root < 4; ++root) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{10000}}) {
        std::vector<std::int32_t> data(count, fabric.rank() == root ? 100 + root : -1);
        fabric.broadcast(data.data(), count * sizeof(std::int32_t), root, "broadcast");
        for (const std::int32_t value : data) ASSERT_EQ(value, 100 + root);
      }
    }
  });
}

TEST(Fabric, SplitOrdersByKeyThenRankAndGroupsAreIndependent) {
  run_engine(8, [&](Fabric& world) {
    const int r = world.rank();
    auto group = world.split(r % 2, -r, "parity");  // reversed order
    ASSERT_NE(group, nullptr);
    EXPECT_EQ(group->size(), 4);
    EXPECT_EQ(group->rank(), 3 - r / 2);
    auto some = world.split(r < 3 ? 5 : -1, 0, "some");
    EXPECT_EQ(some != nullptr, r < 3);
    auto pair = group->split(group->rank() / 2, 0, "pair");  // nested
    ASSERT_EQ(pair->size(), 2);
    std::int64_t sum = r;
    pair->all_reduce(std::span<std::int64_t>(&sum, 1), ReduceOp::kSum, "pair");
    const int first = group->rank() < 2 ? 6 + r % 2 : 2 + r % 2;
    EXPECT_EQ(sum, first + first - 2);
    std::int64_t total = 1;
    group->all_reduce(std::span<std::int64_t>(&total, 1), ReduceOp::kSum, "group");
    EXPECT_EQ(total, 4);
    if (some) some->barrier("some");
    world.barrier("end");
  });
}

TEST(Fabric, AGroupDrivenByTheCallersThreads) {
  auto ends = make_thread_group(3);
  std::vector<std::int64_t> sums(3);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Fabric> fabric = std::move(ends[r]);
      sums[r] = fabric->rank() + 1;
      fabric->all_reduce(std::span<std::int64_t>(&sums[r], 1), ReduceOp::kSum, "sum");
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sums, (std::vector<std::int64_t>{6, 6, 6}));
}

TEST(Fabric, TheSingleFabricCopies) {
  const auto fabric = make_single_fabric();
  EXPECT_EQ(fabric->size(), 1);
  std::vector<int> send = {1, 2, 3}, receive(3);
  const Fabric::Span from{send.data(), 12}, to{receive.data(), 12}, short_to{receive.data(), 8};
  fabric->all_to_all({&from, 1}, {&to, 1}, "copy");
  EXPECT_EQ(receive, send);
  EXPECT_THROW(fabric->all_to_all({&from, 1}, {&short_to, 1}, "copy"), Error);
  float value = 2.5f;
  fabric->all_reduce(std::span<float>(&value, 1), ReduceOp::kSum, "sum");
  EXPECT_EQ(value, 2.5f);
  EXPECT_EQ(fabric->split(-1, 0, "none"), nullptr);
  EXPECT_EQ(fabric->split(3, 0, "one")->size(), 1);
  fabric->abort("enough");
  EXPECT_THROW(fabric->barrier("late"), Error);
}

}  // namespace
}  // namespace waybill
