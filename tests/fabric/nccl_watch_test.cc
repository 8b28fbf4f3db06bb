// SPDX-License-Identifier: Apache-2.0
// The thread that gives a group up by itself, over real lifelines and an NCCL whose kernels are flags: what waits for the device asks nobody, as
// cudaStreamSynchronize(). Needs no GPU.
#include "fabric/nccl/nccl_watch.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "fabric/lifeline_processes.h"

namespace waybill::cuda {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

std::atomic<int> g_poisons, g_aborts, g_poisons_before_abort;
std::atomic<ncclResult_t> g_error;

NcclLibrary fake_nccl() {
  g_poisons = g_aborts = g_poisons_before_abort = 0, g_error = ncclSuccess;
  NcclLibrary nccl;
  nccl.error_string = [](ncclResult_t) { return "an error of NCCL"; };
  nccl.comm_get_async_error = [](ncclComm_t, ncclResult_t* error) { return *error = g_error, ncclSuccess; };
  nccl.comm_abort = [](ncclComm_t) {
    g_poisons_before_abort = g_poisons.load();
    return ++g_aborts, ncclSuccess;
  };
  return nccl;
}

struct World {
  explicit World(int rank = 0) : watch(nccl, comm, rank, kRanks, {[] {}, [] { ++g_poisons; }}) {}
  ~World() {
    watch.stop();
    if (g_poisons > 0) (void)wait_for_abort(milliseconds(5000));  // it runs on a thread of its own
  }
  void start(Lifeline& line, milliseconds timeout = kLong) { watch.start(line, kPerNode, progress, timeout); }
  static bool wait_for_abort(milliseconds patience) {
    for (const auto end = SocketClock::now() + patience; g_aborts == 0 && left_ms(end) > 0;) std::this_thread::sleep_for(milliseconds(1));
    return g_aborts == 1;
  }
  // What a call finds; empty: nothing is lost.
  std::string verdict(ErrorCode wanted) const {
    try {
      watch.throw_if_lost("a step");
    } catch (const Error& error) {
      return error.code() == wanted ? error.what() : fmt::format("another code: {}", error.what());
    }
    return {};
  }
  const NcclLibrary nccl = fake_nccl();
  NcclComm comm{reinterpret_cast<ncclComm_t>(std::uintptr_t{1})};
  RailProgress progress{1, 1, 0};
  NcclWatch watch;
};

void set(std::uint32_t& word, std::uint32_t value) { std::atomic_ref<std::uint32_t>(word).store(value); }

// 0 where `text` has `wanted`.
int says(const std::string& text, const char* wanted) {
  if (text.find(wanted) != std::string::npos) return 0;
  std::fprintf(stderr, "\"%s\" has no \"%s\"\n", text.c_str(), wanted);
  return 1;
}

TEST(NcclWatch, AnEndedProcessFreesAWaitThatAsksNobodyAndIsNamedByEveryRank) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(100));
      ::_exit(7);
    }
    World world(rank);
    world.start(*line);
    set(world.progress.begun, 2);
    if (!World::wait_for_abort(kLong) || g_poisons_before_abort != 1 || !world.comm.is_taken() || world.progress.is_lost == 0) return 10;
    std::this_thread::sleep_for(milliseconds(300));  // these processes end, too: the first loss stands
    return says(world.verdict(ErrorCode::kPeerFailed), fmt::format("rank {} of 4: a step: rank 3 of node 1 is lost, its process has ended", rank).c_str());
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 7));
}

TEST(NcclWatch, MessagesThatStandNameTheRankThatHasNotComeThoughItAnswers) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    World world(rank);
    world.start(*line, milliseconds(rank == 1 ? 300 : 20000));
    if (rank != 3) set(world.progress.begun, 2);  // 3 does something else, for longer
    if (!World::wait_for_abort(kLong)) return 10;
    const std::string text = world.verdict(rank == 1 ? ErrorCode::kTimeout : ErrorCode::kPeerFailed);
    std::this_thread::sleep_for(milliseconds(300));
    if (rank == 1) return says(text, "took longer than 300 ms; answers, but has not come so far: rank 3 of node 1");
    return says(text, rank == 3 ? "the others gave this rank up, it did not come in time" : "rank 3 of node 1 is lost, it answers, but did not come in time");
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
}

TEST(NcclWatch, ARankThatIsStoppedIsNamedAsSilent) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) {  // no thread answers for it
      std::this_thread::sleep_for(milliseconds(3000));
      return wait_for_loss(*line) == 3 && line->loss() == Loss::kSilent ? 0 : 1;
    }
    World world(rank);
    world.start(*line, milliseconds(rank == 1 ? 300 : 20000));
    set(world.progress.begun, 2);
    if (!World::wait_for_abort(kLong)) return 10;
    const std::string text = world.verdict(rank == 1 ? ErrorCode::kTimeout : ErrorCode::kPeerFailed);
    std::this_thread::sleep_for(milliseconds(3000));
    return says(text, rank == 1 ? "took longer than 300 ms; no answer from rank 3 of node 1" : "rank 3 of node 1 is lost, it did not answer its neighbours");
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
}

TEST(NcclWatch, NothingIsGivenUpWhileMessagesMoveOrNoneAreUnderWay) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    World world(rank);
    world.start(*line, milliseconds(400));
    for (std::uint32_t i = 2; i < 22; ++i) {  // one is under way at every look, or none
      if (rank % 2 == 0) set(world.progress.begun, i);
      std::this_thread::sleep_for(milliseconds(100));
      if (rank % 2 == 0) set(world.progress.ended, i - (rank == 2 ? 1 : 0));
    }
    const bool is_lost = world.watch.is_lost();
    world.watch.stop();
    std::this_thread::sleep_for(milliseconds(300));
    return is_lost || g_poisons + g_aborts != 0 || world.comm.is_taken() || !world.verdict(ErrorCode::kTimeout).empty() ? 1 : 0;
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
}

TEST(NcclWatch, AnErrorOfNcclWaitsForTheWordOfALifeline) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(400));
      ::_exit(7);
    }
    World world(rank);
    g_error = ncclRemoteError;
    world.start(*line);
    if (!World::wait_for_abort(kLong)) return 10;
    std::this_thread::sleep_for(milliseconds(1000));
    return says(world.verdict(ErrorCode::kPeerFailed), "rank 3 of node 1 is lost, its process has ended");
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 7));
}

// A program that ends keeps its layers: their threads end before CUDA does, whoever else has gone by then.
TEST(NcclWatch, AProcessThatExitsGivesNothingUp) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) -> int {
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(200));
      ::_exit(7);
    }
    std::atexit([] {  // registered before the thread's: runs behind it, as the end of CUDA does
      std::this_thread::sleep_for(milliseconds(800));
      ::_exit(g_poisons + g_aborts == 0 ? 0 : 9);
    });
    auto* const world = new World(rank);
    world->start(*line.release());
    std::exit(1);
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 7));
}

TEST(NcclWatch, AnErrorOfNcclAloneIsItsText) {
  World world;
  g_error = ncclInProgress;
  EXPECT_FALSE(world.watch.is_lost());
  EXPECT_EQ(world.verdict(ErrorCode::kPeerFailed), "");
  g_error = ncclRemoteError;
  EXPECT_TRUE(world.watch.is_lost());
  EXPECT_EQ(world.verdict(ErrorCode::kPeerFailed), "rank 0 of 4: a step: NCCL: an error of NCCL");
  EXPECT_TRUE(world.watch.has_aborted_within(milliseconds(5000)));
}

TEST(NcclWatch, AnAbortWaitsForACallUnderWayButNotForEver) {
  for (const bool ends : {true, false}) {
    World world;
    std::atomic<bool> is_under_way{false}, may_end{false};
    std::thread caller([&] {
      const NcclComm::Use use = world.comm.use();
      is_under_way = true;
      std::this_thread::sleep_for(milliseconds(300));
      while (!ends && !may_end) std::this_thread::sleep_for(milliseconds(1));  // a launch that waits for what the abort ends
      EXPECT_EQ(g_aborts, ends ? 0 : 1);
    });
    while (!is_under_way) std::this_thread::yield();
    EXPECT_FALSE(world.watch.is_lost());  // does not wait for the call
    world.watch.give_up(ErrorCode::kPeerFailed, "lost");
    EXPECT_TRUE(World::wait_for_abort(kLong)) << ends;
    may_end = true;
    caller.join();
    EXPECT_EQ(world.comm.use().get(), nullptr);
  }
}

TEST(NcclWatch, OneOfManyThreadsGivesTheGroupUp) {
  World world;
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      while (true) {
        if (t == 3) g_error = ncclRemoteError;
        (void)world.comm.use();
        if (t % 2 == 0) (void)world.watch.is_lost();
        try {
          world.watch.throw_if_lost("a step");
        } catch (const Error& error) {
          refused += std::string(error.what()).find("NCCL: an error of NCCL") != std::string::npos ? 1 : 0;
          return;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 4);
  EXPECT_TRUE(World::wait_for_abort(kLong));
  world.watch.give_up(ErrorCode::kTimeout, "found later");
  EXPECT_EQ(world.verdict(ErrorCode::kPeerFailed), "rank 0 of 4: a step: NCCL: an error of NCCL");
  EXPECT_EQ(g_poisons, 1);
}

}  // namespace
}  // namespace waybill::cuda
