// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "fabric/mpi/world.h"
#include "waybill/random.h"

namespace waybill {
namespace {

using testing::g_world;
using ::testing::HasSubstr;

std::size_t pair_bytes(int from, int to, int step) { return static_cast<std::size_t>((from * 7 + to * 3 + step) % 5) * 1001; }
std::uint8_t stamp(int from, int to, std::size_t i) { return static_cast<std::uint8_t>(from * 31 + to * 17 + static_cast<int>(i % 251)); }

// All send and receive buffers of one ragged all-to-all in which many pairs exchange nothing.
struct Ragged {
  std::vector<std::vector<std::uint8_t>> sent, received;
  std::vector<Fabric::Span> send, receive;

  explicit Ragged(const Fabric& fabric, int step) {
    const int me = fabric.rank();
    for (int p = 0; p < fabric.size(); ++p) {
      std::vector<std::uint8_t>& out = sent.emplace_back(pair_bytes(me, p, step));
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = stamp(me, p, i);
      received.emplace_back(pair_bytes(p, me, step), std::uint8_t{0xee});
    }
    for (int p = 0; p < fabric.size(); ++p) {
      send.push_back({sent[static_cast<std::size_t>(p)].data(), sent[static_cast<std::size_t>(p)].size()});
      receive.push_back({received[static_cast<std::size_t>(p)].data(), received[static_cast<std::size_t>(p)].size()});
    }
  }
  void expect_stamps(int me) const {
    for (std::size_t p = 0; p < received.size(); ++p) {
      for (std::size_t i = 0; i < received[p].size(); ++i) ASSERT_EQ(received[p][i], stamp(static_cast<int>(p), me, i)) << "from " << p << " byte " << i;
    }
  }
};

TEST(MpiFabric, RaggedAllToAllDeliversEveryByteOnce) {
  for (int step = 0; step < 20; ++step) {
    Ragged exchange(*g_world, step);
    g_world->all_to_all(exchange.send, exchange.receive, "rows");
    exchange.expect_stamps(g_world->rank());
  }
}

TEST(MpiFabric, SeveralExchangesMayBePendingAndEndInAnyOrder) {
  Ragged a(*g_world, 1), b(*g_world, 2), c(*g_world, 3);
  auto first = g_world->all_to_all_start(a.send, a.receive, "a");
  auto second = g_world->all_to_all_start(b.send, b.receive, "b");
  auto third = g_world->all_to_all_start(c.send, c.receive, "c");
  third->wait();
  first->wait();
  second->wait();
  for (const Ragged* exchange : {&a, &b, &c}) exchange->expect_stamps(g_world->rank());
}

TEST(MpiFabric, AnExchangeMovesWhileTheCallerComputes) {
  constexpr std::size_t kBytes = 4u << 20;  // far above the eager limit: somebody must answer the handshake
  std::vector<std::vector<std::uint8_t>> out, in;
  std::vector<Fabric::Span> send, receive;
  for (int p = 0; p < g_world->size(); ++p) {
    out.emplace_back(kBytes, static_cast<std::uint8_t>(g_world->rank() + 1));
    in.emplace_back(kBytes, std::uint8_t{0});
  }
  for (int p = 0; p < g_world->size(); ++p) {
    send.push_back({out[static_cast<std::size_t>(p)].data(), kBytes});
    receive.push_back({in[static_cast<std::size_t>(p)].data(), kBytes});
  }
  g_world->barrier("start");
  auto request = g_world->all_to_all_start(send, receive, "overlap");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // stands for compute: this thread makes no MPI call
  const auto begin = std::chrono::steady_clock::now();
  request->wait();
  const auto waited = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count(), 300) << "the exchange only moved inside wait()";
  for (int p = 0; p < g_world->size(); ++p) EXPECT_EQ(in[static_cast<std::size_t>(p)].back(), p + 1);
}

TEST(MpiFabric, ReductionsAddInRankOrderAtEverySize) {
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5000}, std::size_t{70001}}) {
    const auto value = [&](int p, std::size_t i) { return random_normal(static_cast<std::uint64_t>(p), i); };
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = value(g_world->rank(), i);
    g_world->all_reduce(values, ReduceOp::kSum, "sum");
    for (std::size_t i = 0; i < count; i += 97) {
      float expected = value(0, i);
      for (int p = 1; p < g_world->size(); ++p) expected += value(p, i);
      ASSERT_EQ(values[i], expected) << i;
    }
  }
  std::int64_t largest = g_world->rank();
  g_world->all_reduce(std::span<std::int64_t>(&largest, 1), ReduceOp::kMax, "max");
  EXPECT_EQ(largest, g_world->size() - 1);
}

TEST(MpiFabric, GatherAndBroadcastCarryBytes) {
  std::vector<int> all(static_cast<std::size_t>(g_world->size()));
  const int mine = 100 + g_world->rank();
  g_world->all_gather(&mine, all.data(), sizeof(int), "gather");
  for (int p = 0; p < g_world->size(); ++p) EXPECT_EQ(all[static_cast<std::size_t>(p)], 100 + p);
  int word = g_world->rank() == 1 ? 42 : 0;
  g_world->broadcast(&word, sizeof(int), 1, "broadcast");
  EXPECT_EQ(word, 42);
}

TEST(MpiFabric, SplitGroupsTalkOnTheirOwn) {
  const int colour = g_world->rank() % 2;
  const auto half = g_world->split(colour, -g_world->rank(), "halves");  // the key reverses the order
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(half->size(), g_world->size() / 2);
  EXPECT_EQ(half->rank(), half->size() - 1 - g_world->rank() / 2);
  std::int64_t sum = g_world->rank();
  half->all_reduce(std::span<std::int64_t>(&sum, 1), ReduceOp::kSum, "sum");
  std::int64_t expected = 0;
  for (int p = colour; p < g_world->size(); p += 2) expected += p;
  EXPECT_EQ(sum, expected);
  EXPECT_EQ(g_world->split(g_world->rank() == 0 ? 0 : -1, 0, "one") == nullptr, g_world->rank() != 0);
}

// The failures below each use a group of their own: the world lives on.
TEST(MpiFabric, ASizeMismatchIsNamedOnEveryRank) {
  const auto group = g_world->split(0, 0, "sizes");
  Ragged exchange(*group, 1);
  std::vector<std::uint8_t> too_much(99999);
  if (group->rank() == 0) exchange.send[1] = {too_much.data(), too_much.size()};
  try {
    group->all_to_all(exchange.send, exchange.receive, "rows");
    FAIL() << "the mismatch went unnoticed on rank " << group->rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("rank 0 sends 99999 bytes to rank 1"));
  }
  EXPECT_THROW(group->barrier("after"), Error);  // a failed group stays failed
}

TEST(MpiFabric, AnotherCollectiveIsNamed) {
  const auto group = g_world->split(0, 0, "order");
  try {
    if (group->rank() == 1) {
      double value = 1;
      group->all_reduce(std::span<double>(&value, 1), ReduceOp::kSum, "norm");
    } else {
      group->barrier("step");
    }
    FAIL() << "the mismatch went unnoticed on rank " << group->rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("norm"));
    EXPECT_THAT(error.what(), HasSubstr("step"));
  }
}

TEST(MpiFabric, AnAbortReachesRanksThatWait) {
  const auto group = g_world->split(0, 0, "abort");
  if (group->rank() == 0) {
    group->abort("the disk is full");
    return;
  }
  try {
    group->barrier("step");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPeerFailed);
    EXPECT_THAT(error.what(), HasSubstr("the disk is full"));
  }
}

TEST(MpiFabric, ASilentPeerEndsInATimeoutWithNames) {
  const auto world = make_mpi_fabric({.fabric = {.timeout = std::chrono::milliseconds(700)}});
  g_world->barrier("start");
  if (world->rank() != 0) {  // rank 0 never calls
    try {
      world->barrier("step");
      FAIL();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kTimeout) {
        EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {} waited 700 ms for rank 0", world->rank())));
        EXPECT_THAT(error.what(), HasSubstr("barrier 'step'"));
      } else {  // another rank's timeout came first; its text names the same peer
        EXPECT_EQ(error.code(), ErrorCode::kPeerFailed);
        EXPECT_THAT(error.what(), HasSubstr("for rank 0"));
      }
    }
  }
  g_world->barrier("end");
}

TEST(MpiFabric, ARankThatLeftIsNamed) {
  auto group = g_world->split(0, 0, "leave");
  if (group->rank() == 0) {
    group.reset();
  } else {
    try {
      group->barrier("step");
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPeerFailed);
      EXPECT_THAT(error.what(), HasSubstr("rank 0"));
    }
  }
  g_world->barrier("end");
}

TEST(MpiFabric, RanksPerNodeForcesTheNodeBoundary) {
  const auto world = make_mpi_fabric({.fabric = {.ranks_per_node = g_world->size() / 2}});
  EXPECT_EQ(world->topology().node_of.front(), 0);
  EXPECT_EQ(world->topology().node_of.back(), 1);
}

}  // namespace
}  // namespace waybill
