// SPDX-License-Identifier: Apache-2.0
// A process of several nodes that ends, sleeps or leaves: every rank that is left names it, and none hangs.
#include <gmock/gmock.h>
#include <poll.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "cuda/nccl_nodes.h"
#include "cuda/node_harness.h"

namespace waybill::cuda {
namespace {

// Rank `lost` ends, or sleeps until another wakes it through `alarm`, before a step of the others: 0 from each that names it.
int lose_a_node(int rank, int P, int per_node, int lost, bool replayed, const int* alarm, SharedCount& passed) {
  play_node(rank, per_node);
  const bool sleeps = alarm != nullptr;
  NcclWorld world(NcclOptions{std::size_t{64} << 20, std::chrono::milliseconds(sleeps ? 2000 : 60000), per_node});
  ExchangeConfig config = two_level_group(P, 1).config();
  config.T_max = kNodeTokens;
  NodeGpu gpu(
      config, world.rail(), world.local_ranks(), world.device(), [&](const std::string& name, std::size_t bytes) { return world.window(name, bytes); },
      [&](int, std::uint64_t offset) { return world.at<void>(offset); });
  world.host_fabric().barrier("rank is there");
  const CudaStream& stream = gpu.stream();
  gpu.upload(0, two_level_group(P, 1), rank);
  gpu.queue(stream), world.synchronize(stream, "the first step");
  std::optional<GraphExec> graph;
  if (replayed) graph = GraphExec::capture(stream, [&](cudaStream_t s) { gpu.queue(s); }), graph->launch(stream), world.synchronize(stream, "the second step");
  world.host_fabric().barrier("all have come this far");
  passed.pass_and_wait_for(P);
  if (rank == lost) {
    pollfd wait{sleeps ? alarm[0] : -1, POLLIN, 0};
    if (sleeps) (void)::poll(&wait, 1, 60000);
    ::_exit(7);
  }
  std::string text;
  try {
    replayed ? graph->launch(stream) : gpu.queue(stream);
    world.synchronize(stream, "a step");
  } catch (const Error& error) {
    text = error.what();
  }
  if (sleeps) (void)!::write(alarm[1], "!", 1);
  // Not by a timeout where the process has ended, so that it does not matter how slow the machine is.
  const std::string wanted = fmt::format("rank {} of node {}", lost, lost / per_node);
  const bool is_named = text.find(wanted) != std::string::npos && text.find(sleeps ? "took longer than 2000 ms" : "its process has ended") != std::string::npos;
  if (!is_named) std::fprintf(stderr, "rank %d: \"%s\", wanted: %s\n", rank, text.c_str(), wanted.c_str());
  stream.synchronize();  // nothing waits for the dead any more
  try {
    graph.reset(), gpu.queue(stream);
  } catch (const Error& error) {
    ::_exit(!is_named ? 1 : (error.code() == (sleeps ? ErrorCode::kTimeout : ErrorCode::kPeerFailed) ? 0 : 2));
  }
  ::_exit(3);
}

// Exit codes of P ranks.
std::vector<int> lose(int P, int per_node, int lost, bool replayed, const int* alarm = nullptr) {
  SharedCount passed;
  return run_processes(P, [&](int rank) { return lose_a_node(rank, P, per_node, lost, replayed, alarm, passed); });
}

TEST(TwoLevelNccl, ANodeThatDiesOrSleepsIsNamedByEveryRankAndNoneHangs) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  for (const bool replayed : {false, true}) EXPECT_THAT(lose(2, 1, 1, replayed), ::testing::ElementsAre(0, 7)) << replayed;
  EXPECT_THAT(lose(2, 1, 0, false), ::testing::ElementsAre(7, 0));
  int alarm[2] = {};
  ASSERT_EQ(::pipe(alarm), 0);
  EXPECT_THAT(lose(2, 1, 1, false, alarm), ::testing::ElementsAre(0, 7));
}

// The process ends while both queue step after step, several ahead of what has run: NCCL may refuse a message, or have taken all of them.
TEST(TwoLevelNccl, ANodeThatDiesAmongStepsIsNamed) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  for (const int delay_ms : {20, 43, 71, 130}) {
    SharedCount passed;
    const auto body = [&](int rank) -> int {
      play_node(rank, 1);
      NcclWorld world(NcclOptions{std::size_t{64} << 20, std::chrono::milliseconds(60000), 1});
      ExchangeConfig config = two_level_group(2, 1).config();
      config.T_max = kNodeTokens;
      NodeGpu gpu(
          config, world.rail(), world.local_ranks(), world.device(), [&](const std::string& name, std::size_t bytes) { return world.window(name, bytes); },
          [&](int, std::uint64_t offset) { return world.at<void>(offset); });
      gpu.upload(0, two_level_group(2, 1), rank);
      world.host_fabric().barrier("rank is there");
      passed.pass_and_wait_for(2);
      if (rank == 1) std::thread([&] { std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms)), ::_exit(7); }).detach();
      std::string text;
      try {
        while (true) {
          for (int step = 0; step < 4; ++step) gpu.queue(gpu.stream());
          world.synchronize(gpu.stream(), "four steps");
        }
      } catch (const Error& error) {
        text = error.what();
      }
      if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(60));
      const bool is_named = text.find("rank 1 of node 1 is lost, its process has ended") != std::string::npos;
      if (!is_named) std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
      gpu.stream().synchronize();
      ::_exit(is_named ? 0 : 1);
    };
    EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7)) << delay_ms;
  }
}

// Nobody asks the world: a rank waits by CUDA's own call, as a framework does. A wait that does not end is cut off by an alarm, which fails the test. Behind
// play_node().
struct Unasked {
  Unasked(int rank, std::chrono::milliseconds timeout, bool replayed, SharedCount& passed)
      : world(NcclOptions{std::size_t{64} << 20, timeout, 1}),
        gpu(
            config(), world.rail(), world.local_ranks(), world.device(),
            [this](const std::string& name, std::size_t bytes) { return world.window(name, bytes); },
            [this](int, std::uint64_t offset) { return world.at<void>(offset); }) {
    gpu.upload(0, two_level_group(2, 1), rank);
    world.host_fabric().barrier("rank is there");
    gpu.queue(gpu.stream()), gpu.stream().synchronize();
    if (replayed) graph = GraphExec::capture(gpu.stream(), [&](cudaStream_t s) { gpu.queue(s); });
    if (graph) graph->launch(gpu.stream()), gpu.stream().synchronize();
    is_fine = gpu.is_valid(0) && gpu.status(0).flags == kStatusOk && world_says().empty();
    world.host_fabric().barrier("all have come this far");
    passed.pass_and_wait_for(2);
    ::alarm(60);
  }
  static ExchangeConfig config() {
    ExchangeConfig config = two_level_group(2, 1).config();
    config.T_max = kNodeTokens;
    return config;
  }
  void step() { graph ? graph->launch(gpu.stream()) : gpu.queue(gpu.stream()); }
  std::string world_says() const {
    try {
      world.check("a call");
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }
  // What a rank finds behind the end of its stream: the verdict, a step that says it is worthless, and calls that are refused with the same text. A replay
  // that is launched all the same ends, too.
  int after_the_loss(const std::string& wanted, bool is_whole) {
    const std::string text = world_says();
    const auto fails = [&](int code, const char* why) {
      std::fprintf(stderr, "%s: \"%s\", wanted: %s\n", why, text.c_str(), wanted.c_str());
      return code;
    };
    if (!is_fine) return fails(1, "before the loss");
    if (text.find(wanted) == std::string::npos) return fails(2, "verdict");
    if (graph) graph->launch(gpu.stream());
    if (cudaStreamSynchronize(gpu.stream()) != cudaSuccess) return fails(3, "a replay behind the loss");
    if (is_whole && (gpu.is_valid(0) || (gpu.status(0).flags & kStatusTimeout) == 0)) return fails(4, "the step is valid");
    if (is_whole && std::ranges::any_of(gpu.out(0), [](float x) { return x != 0; })) return fails(5, "the step has results");
    graph.reset();
    try {
      gpu.queue(gpu.stream());
    } catch (const Error& error) {
      return std::string(error.what()).find(wanted) != std::string::npos ? 0 : fails(6, error.what());
    }
    return fails(7, "the rail does not refuse");
  }

  NcclWorld world;
  NodeGpu gpu;
  std::optional<GraphExec> graph;
  bool is_fine = false;
};

TEST(TwoLevelNccl, ANodeThatDiesMidRunFreesAStreamThatCudaItselfWaitsFor) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  for (const bool replayed : {false, true}) {
    for (const int ahead : {4}) {  // steps before a wait
      SharedCount passed;
      const auto body = [&](int rank) -> int {
        play_node(rank, 1);
        Unasked own(rank, std::chrono::milliseconds(60000), replayed, passed);
        if (rank == 1) std::thread([] { std::this_thread::sleep_for(std::chrono::milliseconds(50)), ::_exit(7); }).detach();
        try {
          while (rank == 1 || own.world_says().empty()) {
            for (int i = 0; i < ahead; ++i) own.step();
            if (cudaStreamSynchronize(own.gpu.stream()) != cudaSuccess) ::_exit(8);
          }
        } catch (const Error&) {  // NCCL, or the world, refused a message on the way
          if (replayed || cudaStreamSynchronize(own.gpu.stream()) != cudaSuccess) ::_exit(9);
        }
        ::_exit(own.after_the_loss("rank 1 of node 1 is lost, its process has ended", replayed));
      };
      EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7)) << replayed << ", " << ahead;
    }
  }
}

TEST(TwoLevelNccl, ANodeThatDoesNotComeIsNamedThoughNobodyAsksAndItAnswers) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  for (const bool replayed : {false, true}) {
    int alarm[2] = {};
    ASSERT_EQ(::pipe(alarm), 0);
    SharedCount passed;
    const auto body = [&](int rank) -> int {
      play_node(rank, 1);
      Unasked own(rank, std::chrono::milliseconds(2000), replayed, passed);
      if (rank == 1) {
        pollfd wait{alarm[0], POLLIN, 0};
        (void)::poll(&wait, 1, 60000);
        ::_exit(own.after_the_loss("the others gave this rank up, it did not come in time", replayed));
      }
      own.step();
      const bool has_ended = cudaStreamSynchronize(own.gpu.stream()) == cudaSuccess;
      (void)!::write(alarm[1], "!", 1);
      ::_exit(has_ended ? own.after_the_loss("took longer than 2000 ms; answers, but has not come so far: rank 1 of node 1", true) : 8);
    };
    EXPECT_THAT(run_processes(2, body), ::testing::Each(0)) << replayed;
    ::close(alarm[0]), ::close(alarm[1]);
  }
}

// The world's thread calls CUDA while another captures in the strictest mode, which calls of other threads may break.
TEST(TwoLevelNccl, ALossDisturbsNoCapture) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  SharedCount passed;
  const auto body = [&](int rank) -> int {
    play_node(rank, 1);
    Unasked own(rank, std::chrono::milliseconds(60000), false, passed);
    if (rank == 1) std::thread([] { std::this_thread::sleep_for(std::chrono::milliseconds(500)), ::_exit(7); }).detach();
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(60));
    const DeviceBuffer bytes(1024, own.world.device());
    const CudaStream other(own.world.device());
    own.step();
    WB_TRY_CUDA(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal));
    bytes.fill(1, other);
    for (int i = 0; i < 3000 && own.world_says().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the abort
    bytes.fill(2, other);
    cudaGraph_t captured = nullptr;
    WB_TRY_CUDA(cudaStreamEndCapture(other, &captured));
    std::size_t nodes = 0;
    WB_TRY_CUDA(cudaGraphGetNodes(captured, nullptr, &nodes));
    if (nodes != 2 || cudaStreamSynchronize(own.gpu.stream()) != cudaSuccess) ::_exit(8);
    ::_exit(own.after_the_loss("rank 1 of node 1 is lost, its process has ended", true));
  };
  EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7));
}

TEST(TwoLevelNccl, ALostRankOfATwoRankNodeIsNamedByTheOtherThree) {
  WB_NEEDS_TWO_NCCL_GPUS();
  EXPECT_THAT(lose(4, 2, 3, false), ::testing::ElementsAre(0, 0, 0, 7));
}

// Outside of steps: a host collective names the lost rank, and the world goes without waiting for what the stream still holds of it.
TEST(NcclWorldLost, AHostCollectiveNamesTheRankAndTheWorldEnds) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  for (const bool with_message : {false, true}) {
    for (const bool with_collective : {true, false}) {
      SharedCount passed;
      const auto body = [&](int rank) {
        play_two_nodes(rank);
        std::string text = with_collective ? "" : "rank 1 of node 1 is lost, its process has ended";
        {
          NcclWorld world(NcclOptions{std::size_t{4} << 20, std::chrono::milliseconds(60000), 1});
          const auto from = world.window("from", 4096), to = world.window("to", 4096);
          const CudaStream stream(world.device());
          const RailMessage message[] = {{0, 1 - rank, world.at<void>(from), world.at<void>(to), 4096}};
          world.rail().exchange(message, stream), world.synchronize(stream, "a message");
          world.host_fabric().barrier("both have come this far");
          passed.pass_and_wait_for(2);
          if (rank == 1) ::_exit(7);
          try {
            if (with_message) world.rail().exchange(message, stream);
            if (with_collective) world.host_fabric().barrier("one has left");
          } catch (const Error& error) {
            text = error.what();
          }
        }
        const bool is_named = text.find("rank 1 of node 1 is lost, its process has ended") != std::string::npos;
        if (!is_named) std::fprintf(stderr, "%s\n", text.c_str());
        return is_named ? 0 : 1;
      };
      EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7)) << with_message << with_collective;
    }
  }
}

// A rank that leaves in order, in the middle of a step: the other's world does not wait for it longer than its timeout.
TEST(NcclWorldLost, TheWorldEndsWhereAnotherRankHasLeft) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  SharedCount passed;
  const auto body = [&](int rank) {
    play_two_nodes(rank);
    NcclWorld world(NcclOptions{std::size_t{4} << 20, std::chrono::milliseconds(2000), 1});
    const auto from = world.window("from", 4096), to = world.window("to", 4096);
    const RailMessage message[] = {{0, 1 - rank, world.at<void>(from), world.at<void>(to), 4096}};
    world.host_fabric().barrier("both have come this far");
    passed.pass_and_wait_for(2);
    const CudaStream stream(world.device());
    if (rank == 0) world.rail().exchange(message, stream);
    return 0;
  };
  EXPECT_THAT(run_processes(2, body), ::testing::Each(0));
}

TEST(NcclWorldLost, ARankThatEndsWhileNcclStartsIsAnErrorWithinTheTimeout) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  const auto body = [](int rank) -> int {
    play_two_nodes(rank);
    NcclOptions wanted{std::size_t{4} << 20, std::chrono::milliseconds(1000), 1, std::chrono::milliseconds(15000)};
    if (rank == 1) {
      ncclUniqueId id{};
      hand_out(process_rank(), &id, sizeof(id), std::chrono::milliseconds(60000));
      ::_exit(7);
    }
    try {
      const NcclWorld world(wanted);
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kPeerFailed ? 0 : 1);
    }
    ::_exit(2);
  };
  EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7));
}

}  // namespace
}  // namespace waybill::cuda
