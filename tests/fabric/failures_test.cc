// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "fabric/engine.h"

namespace waybill {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

// The error the ranks end with; every rank's own error in `texts`.
struct Outcome {
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  std::vector<std::string> texts;
  std::vector<ErrorCode> codes;
  double seconds = 0;
};

Outcome run_to_failure(int P, const std::function<void(Fabric&)>& body, milliseconds timeout = milliseconds(20000)) {
  Outcome outcome;
  outcome.texts.resize(static_cast<std::size_t>(P));
  outcome.codes.resize(static_cast<std::size_t>(P), ErrorCode::kInternal);
  const auto start = std::chrono::steady_clock::now();
  try {
    run_engine(
        P,
        [&](Fabric& fabric) {
          try {
            body(fabric);
          } catch (const Error& error) {
            outcome.texts[static_cast<std::size_t>(fabric.rank())] = error.what();
            outcome.codes[static_cast<std::size_t>(fabric.rank())] = error.code();
            throw;
          }
        },
        FabricOptions{timeout});
    ADD_FAILURE() << "the ranks returned without an error";
  } catch (const Error& error) {
    outcome.code = error.code();
    outcome.text = error.what();
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

TEST(FabricFailures, AThrowingRankWakesTheOthersAndIsNamed) {
  for (const int P : {2, 4, 17}) {
    const Outcome outcome = run_to_failure(P, [&](Fabric& fabric) {
      if (fabric.rank() == 1) WB_FAIL(ErrorCode::kIo, "disk full");
      fabric.barrier("step");
      fabric.barrier("step");
    });
    EXPECT_EQ(outcome.code, ErrorCode::kIo);
    EXPECT_EQ(outcome.text, "rank 1: disk full");
    EXPECT_EQ(outcome.codes[0], ErrorCode::kPeerFailed);
    EXPECT_THAT(outcome.texts[0], AllOf(HasSubstr("rank 1"), HasSubstr("disk full")));
    EXPECT_LT(outcome.seconds, 5);
  }
}

TEST(FabricFailures, ForeignExceptionsBecomeInternalWithTheRank) {
  const Outcome outcome = run_to_failure(3, [&](Fabric& fabric) {
    if (fabric.rank() == 2) throw std::runtime_error("boom");
    fabric.barrier("step");
  });
  EXPECT_EQ(outcome.code, ErrorCode::kInternal);
  EXPECT_EQ(outcome.text, "rank 2: boom");
  EXPECT_THROW(run_engine(2,
                          [](Fabric& fabric) {
                            if (fabric.rank() == 0) throw 42;
                            fabric.barrier("step");
                          }),
               int);
}

TEST(FabricFailures, AThrowInAChildGroupReachesRanksOfOtherGroups) {
  const Outcome outcome = run_to_failure(4, [&](Fabric& world) {
    auto group = world.split(world.rank() / 2, 0, "half");
    if (world.rank() == 3) WB_FAIL(ErrorCode::kInvalidArgument, "rank 3 stops");
    if (world.rank() == 2) group->barrier("never");
    if (world.rank() < 2) group->barrier("fine");
    if (world.rank() < 2) world.barrier("never");
  });
  EXPECT_EQ(outcome.text, "rank 3: rank 3 stops");
  for (const std::size_t rank : {0u, 1u, 2u}) EXPECT_EQ(outcome.codes[rank], ErrorCode::kPeerFailed) << rank;
}

TEST(FabricFailures, ATimeoutNamesRankPeersPhaseExpectedAndSeen) {
  std::atomic<bool> stop{false};
  const Outcome outcome = run_to_failure(
      4,
      [&](Fabric& fabric) {
        if (fabric.rank() == 2) {
          while (!stop) std::this_thread::sleep_for(milliseconds(5));
          fabric.barrier("gradients");  // late: the group has failed, nobody's memory is touched
          return;
        }
        try {
          fabric.barrier("gradients");
        } catch (...) {
          stop = true;
          throw;
        }
      },
      milliseconds(100));
  EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("timeout after 100 ms"), HasSubstr("'gradients'"), HasSubstr("for rank(s) 2:"), HasSubstr("expected 4"), HasSubstr("seen 3")));
  EXPECT_EQ(outcome.codes[2], ErrorCode::kPeerFailed);
  EXPECT_LT(outcome.seconds, 5);
}

TEST(FabricFailures, ATimeoutOfAnAllToAllLeavesBuffersAlone) {
  std::atomic<bool> stop{false};
  const Outcome outcome = run_to_failure(
      2,
      [&](Fabric& fabric) {
        if (fabric.rank() == 1) {
          while (!stop) std::this_thread::sleep_for(milliseconds(5));
        }
        std::vector<std::int32_t> send(2000, 7), receive(2000, -1);
        const std::vector<Fabric::Span> from = {{send.data(), 4000}, {send.data() + 1000, 4000}};
        const std::vector<Fabric::Span> to = {{receive.data(), 4000}, {receive.data() + 1000, 4000}};
        try {
          fabric.all_to_all(from, to, "rows");
        } catch (...) {
          stop = true;
          EXPECT_EQ(receive, std::vector<std::int32_t>(2000, -1));
          throw;
        }
      },
      milliseconds(100));
  EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("rank 0: "), HasSubstr("all_to_all"), HasSubstr("'rows'"), HasSubstr("for rank(s) 1:")));
}

TEST(FabricFailures, AnotherCollectiveIsNamedOnEveryRank) {
  const Outcome outcome = run_to_failure(3, [&](Fabric& fabric) {
    fabric.barrier("same");
    std::int32_t value = 0, all[3];
    if (fabric.rank() == 1)
      fabric.all_gather(&value, all, 4, "counts");
    else
      fabric.barrier("step");
  });
  EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
  for (const std::string& text : outcome.texts) {
    EXPECT_THAT(text, AllOf(HasSubstr("collective 1"), HasSubstr("all_gather, phase 'counts'"), HasSubstr("barrier, phase 'step'"), HasSubstr("rank 1")));
  }
}

TEST(FabricFailures, AnotherPhaseOrSizeIsNamed) {
  Outcome outcome = run_to_failure(2, [&](Fabric& fabric) { fabric.barrier(fabric.rank() == 0 ? "layer 1" : "layer 2"); });
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("'layer 1'"), HasSubstr("'layer 2'")));
  outcome = run_to_failure(2, [&](Fabric& fabric) {
    std::vector<float> values(fabric.rank() == 0 ? 10 : 11);
    fabric.all_reduce(std::span<float>(values), ReduceOp::kSum, "sum");
  });
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("40 bytes"), HasSubstr("44 bytes")));
}

TEST(FabricFailures, UnequalSizesAreNamedOnEveryRankAndNoByteMoves) {
  const Outcome outcome = run_to_failure(4, [&](Fabric& fabric) {
    std::vector<std::byte> send(64, std::byte{1}), receive(64, std::byte{0});
    std::vector<Fabric::Span> from(4), to(4);
    for (std::size_t p = 0; p < 4; ++p) {
      from[p] = {send.data() + 16 * p, 16};
      to[p] = {receive.data() + 16 * p, fabric.rank() == 3 && p == 2 ? std::size_t{12} : std::size_t{16}};
    }
    try {
      fabric.all_to_all(from, to, "rows");
    } catch (...) {
      EXPECT_EQ(receive, std::vector<std::byte>(64, std::byte{0}));
      throw;
    }
  });
  EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
  for (const std::string& text : outcome.texts) EXPECT_THAT(text, HasSubstr("rank 2 sends 16 bytes to rank 3, which expects 12 bytes"));
}

TEST(FabricFailures, ARankThatLeavesFailsThoseThatWaitForItAtOnce) {
  const Outcome outcome = run_to_failure(3, [&](Fabric& fabric) {
    if (fabric.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(50));  // the others wait by then
      return;
    }
    fabric.barrier("step");
  });
  EXPECT_EQ(outcome.code, ErrorCode::kPeerFailed);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("'step'"), HasSubstr("rank 1 has left")));
  EXPECT_LT(outcome.seconds, 5);
}

TEST(FabricFailures, AbortWakesPendingAndLaterCalls) {
  std::atomic<int> woken{0};
  run_engine(3, [&](Fabric& fabric) {
    if (fabric.rank() == 0) fabric.abort("out of patience");
    for (int i = 0; i < 2; ++i) {
      try {
        fabric.barrier("step");
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kPeerFailed);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0"), HasSubstr("out of patience")));
        ++woken;
      }
    }
  });
  EXPECT_EQ(woken.load(), 6);
}

TEST(FabricFailures, AnExceptionWithAPendingExchangeDoesNotHang) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Outcome outcome = run_to_failure(3, [&](Fabric& fabric) {
      std::vector<std::byte> send(300000), receive(300000);
      std::vector<Fabric::Span> from, to;
      for (std::size_t p = 0; p < 3; ++p) {
        from.push_back({send.data() + 100000 * p, 100000});
        to.push_back({receive.data() + 100000 * p, 100000});
      }
      const auto request = fabric.all_to_all_start(from, to, "rows");
      if (fabric.rank() == 1) WB_FAIL(ErrorCode::kIo, "stop");
      request->wait();
      fabric.barrier("after");
    });
    EXPECT_EQ(outcome.text, "rank 1: stop");
    EXPECT_LT(outcome.seconds, 5);
  }
}

TEST(FabricFailures, BadArgumentsAreRefused) {
  EXPECT_THROW(run_engine(0, [](Fabric&) {}), Error);
  EXPECT_THROW(run_engine(
                   1, [](Fabric&) {}, FabricOptions{milliseconds(0)}),
               Error);
  const Outcome outcome = run_to_failure(2, [&](Fabric& fabric) { fabric.broadcast(nullptr, 0, 2, "weights"); });
  EXPECT_THAT(outcome.text, HasSubstr("root 2 is outside [0, 2)"));
}

}  // namespace
}  // namespace waybill
