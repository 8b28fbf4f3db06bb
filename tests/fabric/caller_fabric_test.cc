// SPDX-License-Identifier: Apache-2.0
// The caller engine over a transport that stands for a framework's process group: here the threads engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "waybill/fabric.h"

namespace waybill {
namespace {

using testing::HasSubstr;

class ThreadsTransport final : public FabricTransport {
 public:
  explicit ThreadsTransport(Fabric& fabric) : fabric_(fabric) {}
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) override {
    if (++num_calls == fail_at) WB_FAIL(ErrorCode::kIo, "cable cut");
    std::vector<Fabric::Span> from, to;
    auto* out = const_cast<std::byte*>(static_cast<const std::byte*>(send));
    auto* in = static_cast<std::byte*>(receive);
    for (std::size_t p = 0; p < send_bytes.size(); ++p) {
      from.push_back({out, static_cast<std::size_t>(send_bytes[p])});
      to.push_back({in, static_cast<std::size_t>(receive_bytes[p])});
      out += send_bytes[p];
      in += receive_bytes[p];
    }
    fabric_.all_to_all(from, to, "transport");
  }
  int num_calls = 0, fail_at = -1;

 private:
  Fabric& fabric_;
};

void on_caller_ranks(int P, const std::function<void(Fabric& caller, Fabric& threads)>& body, int fail_at = -1) {
  run_ranks(
      P,
      [&](Fabric& threads) {
        auto transport = std::make_unique<ThreadsTransport>(threads);
        transport->fail_at = fail_at;
        const auto caller = make_caller_fabric(std::move(transport), threads.size(), threads.rank());
        body(*caller, threads);
      },
      FabricOptions{std::chrono::milliseconds(10000)});
}

// Text of the error that `call` ends with.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class CallerFabricTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, CallerFabricTest, testing::Values(1, 2, 3, 5, 8));

TEST_P(CallerFabricTest, ReductionsHaveTheBitsOfTheThreadsEngine) {
  on_caller_ranks(GetParam(), [](Fabric& caller, Fabric& threads) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{10000}, std::size_t{(1u << 20) + 3}}) {
      std::vector<float> a(count);
      for (std::size_t i = 0; i < count; ++i) a[i] = 1.0f / static_cast<float>(i + 3 * static_cast<std::size_t>(caller.rank()) + 1);
      std::vector<float> b = a;
      caller.all_reduce(std::span<float>(a), ReduceOp::kSum, "sum");
      threads.all_reduce(std::span<float>(b), ReduceOp::kSum, "sum");
      EXPECT_EQ(a, b);
    }
    std::vector<std::int64_t> extremes{caller.rank(), -caller.rank()};
    caller.all_reduce(std::span<std::int64_t>(extremes), ReduceOp::kMax, "max");
    EXPECT_EQ(extremes, (std::vector<std::int64_t>{caller.size() - 1, 0}));
  });
}

TEST_P(CallerFabricTest, GatherBroadcastAndRaggedAllToAll) {
  on_caller_ranks(GetParam(), [](Fabric& caller, Fabric&) {
    const int P = caller.size(), me = caller.rank();
    std::vector<int> all(static_cast<std::size_t>(P), -1);
    caller.all_gather(&me, all.data(), sizeof(me), "gather");
    std::vector<int> expected(all.size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);

    int root_says = me == P - 1 ? 42 : 0;
    caller.broadcast(&root_says, sizeof(root_says), P - 1, "broadcast");
    EXPECT_EQ(root_says, 42);

    // Rank a sends (a + 2 b) % 4 values a * 10 + b to rank b.
    const auto count = [](int a, int b) { return static_cast<std::size_t>((a + 2 * b) % 4); };
    std::vector<std::vector<int>> send, receive;
    std::vector<Fabric::Span> from, to;
    for (int p = 0; p < P; ++p) {
      send.emplace_back(count(me, p), me * 10 + p);
      receive.emplace_back(count(p, me), -1);
    }
    for (int p = 0; p < P; ++p) {
      from.push_back({send[static_cast<std::size_t>(p)].data(), send[static_cast<std::size_t>(p)].size() * sizeof(int)});
      to.push_back({receive[static_cast<std::size_t>(p)].data(), receive[static_cast<std::size_t>(p)].size() * sizeof(int)});
    }
    caller.all_to_all(from, to, "ragged");
    for (int p = 0; p < P; ++p) EXPECT_EQ(receive[static_cast<std::size_t>(p)], std::vector<int>(count(p, me), p * 10 + me));
    caller.barrier("end");
  });
}

TEST(CallerFabric, AnotherCollectiveOrSizeIsNamedOnEveryRankAndTheGroupStaysFailed) {
  on_caller_ranks(3, [](Fabric& caller, Fabric&) {
    EXPECT_THAT(error_of([&] { caller.rank() == 2 ? caller.broadcast(nullptr, 0, 0, "weights") : caller.barrier("step"); }),
                HasSubstr("rank 0 barrier 'step' (collective 0, 0 bytes, detail 0), rank 2 broadcast 'weights'"));
    EXPECT_THAT(error_of([&] { caller.barrier("step"); }), HasSubstr("different collectives"));
  });
  on_caller_ranks(3, [](Fabric& caller, Fabric&) {
    int value = 0;
    std::vector<Fabric::Span> send(3), receive(3);
    if (caller.rank() == 0) send[1] = {&value, 4};
    if (caller.rank() == 1) receive[0] = {&value, 2};
    EXPECT_THAT(error_of([&] { caller.all_to_all(send, receive, "rows"); }), HasSubstr("rank 0 sends 4 bytes to rank 1, which expects 2 bytes"));
  });
}

TEST(CallerFabric, ARankThatGivesUpWakesTheOthersWithItsReason) {
  on_caller_ranks(3, [](Fabric& caller, Fabric&) {
    if (caller.rank() == 1) {
      caller.abort("disk full");
      EXPECT_THAT(error_of([&] { caller.barrier("step"); }), HasSubstr("rank 1 failed: disk full"));
    } else {
      EXPECT_THAT(error_of([&] { caller.barrier("step"); }), HasSubstr("rank 1 failed: disk full"));
      caller.abort("the peer failed");  // must not wait for anybody
    }
  });
}

TEST(CallerFabric, AFailedTransportIsNamedAndNotUsedAgain) {
  const auto fail_second = [](Fabric& caller, Fabric&) {
    EXPECT_THAT(error_of([&] { caller.all_gather(nullptr, nullptr, 0, "gather"); }), HasSubstr("the caller's transport failed: cable cut"));
    EXPECT_THAT(error_of([&] { caller.barrier("step"); }), HasSubstr("cable cut"));
    caller.abort("late");
  };
  on_caller_ranks(2, fail_second, 2);
}

TEST(CallerFabric, RefusesWhatCannotBe) {
  on_caller_ranks(2, [](Fabric& caller, Fabric& threads) {
    EXPECT_THAT(error_of([&] { caller.split(0, 0, "replicas"); }), HasSubstr("cannot be split"));
    EXPECT_THAT(error_of([&] { make_caller_fabric(std::make_unique<ThreadsTransport>(threads), 2, 2); }),
                HasSubstr("rank is 2, a group of 2 has ranks 0 to 1"));
    EXPECT_THAT(error_of([&] { make_caller_fabric(nullptr, 2, 0); }), HasSubstr("transport is null"));
  });
}

}  // namespace
}  // namespace waybill
