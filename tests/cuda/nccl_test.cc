// SPDX-License-Identifier: Apache-2.0
// The exchange between processes over NCCL windows: what the CPU engine gives, to the bit; what happens when a process dies or differs.
#include <gmock/gmock.h>

#include <filesystem>

#include "cuda/exchange_harness.h"
#include "cuda/nccl_nodes.h"
#include "cuda/node_harness.h"
#include "exchange/cuda/group_config.h"
#include "fabric/nccl/nccl_transport.h"

namespace waybill::cuda {
namespace {

// One rank's exchange with all of its memory.
class Rank {
 public:
  Rank(NcclWorld& world, const ExchangeConfig& config) : world_(world), config_(config), P_(world.size()) {
    check_group_config(world.host_fabric(), config, block_placement(config.E, P_));
    windows_ = book_exchange_windows(config, P_, [&](const std::string& name, std::size_t bytes) { return world.window(name, bytes); });
    const auto row = static_cast<std::size_t>(config.H) * 4;
    rows_ = world.window("rows", row_window_bytes(config, P_, row)), z_ = world.window("partials", row_window_bytes(config, P_, row));
    exchange_ = std::make_unique<DeviceExchange>(config, block_placement(config.E, P_), world.local_ranks(), world.device(), windows_);
    handle_ = exchange_->make_handle();
    const auto T = static_cast<std::size_t>(config.T_max), K = static_cast<std::size_t>(config.K);
    ids_ = DeviceBuffer(T * K * 4, world.device()), weights_ = DeviceBuffer(T * K * 4, world.device()), x_ = DeviceBuffer(T * row, world.device());
    out_ = DeviceBuffer(T * row, world.device());
    y_ = DeviceBuffer(static_cast<std::size_t>(exchange_->budget().padded_slots) * row, world.device());
    stream_ = std::make_unique<CudaStream>(world.device());
    world.host_fabric().barrier("rank is there");  // before any kernel posts to a peer
  }
  void upload(const ts::Group& group) {
    const RouteView& route = group.routes[static_cast<std::size_t>(world_.rank())].view();
    const ts::Floats& x = group.x[static_cast<std::size_t>(world_.rank())];
    T_ = route.T;
    ids_.upload(route.ids, static_cast<std::size_t>(T_ * route.K) * size_bytes(route.id_dtype), *stream_);
    weights_.upload(route.weights, static_cast<std::size_t>(T_ * route.K) * 4, *stream_);
    x_.upload(x.data(), x.size() * 4, *stream_), out_.fill(0xff, *stream_);
    stream_->synchronize();
  }
  void queue(cudaStream_t s) {
    const DeviceRoute route[] = {{ids_.data(), weights_.as<float>(), T_}};
    const DeviceRows x[] = {{x_.data(), 0}}, rows[] = {{world_.at<void>(rows_), 0}}, z[] = {{world_.at<void>(z_), 0}}, y[] = {{y_.data(), 0}};
    const DeviceRows out[] = {{out_.data(), 0}};
    exchange_->plan(handle_, route, s);
    exchange_->layout(handle_, s);
    exchange_->dispatch(handle_, DType::kF32, x, rows_, true, s);
    exchange_->permute(handle_, DType::kF32, rows, y, s);
    exchange_->unpermute_reduce(handle_, DType::kF32, y, false, DType::kF32, z, true, s);
    exchange_->combine(handle_, z_, DType::kF32, out, s);
  }
  ts::Floats out() {
    stream_->synchronize();
    ts::Floats values(static_cast<std::size_t>(T_ * config_.H));
    out_.download(values.data(), values.size() * 4, *stream_);
    stream_->synchronize();
    return values;
  }
  ReceiveLayout layout() { return exchange_->read(handle_, 0, *stream_).layout; }
  StatusWord status() { return exchange_->status(0, *stream_); }
  const CudaStream& stream() { return *stream_; }

 private:
  NcclWorld& world_;
  ExchangeConfig config_;
  int P_;
  ExchangeWindows windows_;
  std::uint64_t rows_ = 0, z_ = 0;
  std::unique_ptr<DeviceExchange> exchange_;
  DeviceHandle handle_;
  DeviceBuffer ids_, weights_, x_, out_, y_;
  std::unique_ptr<CudaStream> stream_;
  std::int64_t T_ = 0;
};

ts::Group group_of(std::uint64_t seed) { return ts::random_group({200, 133}, 6, 64, 512, ts::RandomRoute{.seed = seed}, false); }

ExchangeConfig config_for(const ts::Group& group) {
  ExchangeConfig config = group.config();
  config.T_max = 200;
  return config;
}

NcclOptions options(int timeout_ms) { return NcclOptions{std::size_t{64} << 20, std::chrono::milliseconds(timeout_ms)}; }

TEST(ExchangeNccl, TwoProcessesGiveTheCpuEnginesBitsEagerAndReplayed) {
  WB_NEEDS_TWO_NCCL_GPUS();
  const auto body = [](int rank) {
    NcclWorld world(options(20000));
    std::vector<ts::Group> groups;
    std::vector<ts::RankResult> want;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      groups.push_back(group_of(seed));
      want.push_back(ts::run_group(groups.back(), config_for(groups.back()))[static_cast<std::size_t>(rank)]);
    }
    Rank mine(world, config_for(groups[0]));
    for (std::size_t i = 0; i < groups.size(); ++i) {
      mine.upload(groups[i]);
      mine.queue(mine.stream());
      if (mine.out() != want[i].out || mine.layout().slot_row != want[i].handle.layout.slot_row) return 1;
    }
    const GraphExec graph = GraphExec::capture(mine.stream(), [&](cudaStream_t s) { mine.queue(s); });  // T of the last group
    for (int i = 0; i < 2000; ++i) graph.launch(mine.stream());
    if (mine.out() != want.back().out) return 2;
    return world.first_error().empty() ? 0 : 3;
  };
  EXPECT_THAT(run_processes(2, body), ::testing::Each(0));
}

TEST(ExchangeNccl, AProcessThatDiesIsNamedWithinTheTimeout) {
  WB_NEEDS_TWO_NCCL_GPUS();
  SharedCount passed;
  const auto body = [&](int rank) {
    NcclWorld world(options(1500));
    const ts::Group group = group_of(5);
    Rank mine(world, config_for(group));
    mine.upload(group);
    for (int step = 0; step < 5; ++step) mine.queue(mine.stream());
    mine.stream().synchronize();
    world.host_fabric().barrier("both have come this far");
    passed.pass_and_wait_for(2);
    if (rank == 1) ::_exit(7);
    const auto start = std::chrono::steady_clock::now();
    mine.queue(mine.stream());
    const ts::Floats out = mine.out();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const StatusWord status = mine.status();
    if (status.flags != kStatusTimeout || status.timeout_peer != 1 || seconds > 5) return 1;
    for (const float value : out) {
      if (value != 0.0f) return 2;
    }
    world.abandon();
    ::_exit(0);  // nothing waits for the dead
  };
  EXPECT_THAT(run_processes(2, body), ::testing::ElementsAre(0, 7));
}

// On two GPUs in one domain; on one GPU as two nodes.
TEST(ExchangeNccl, DifferentConfigsAndWindowsAreRefusedOnEveryRank) {
  static const int gpus = gpus_for_nccl();
  if (gpus < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  const auto refused = [](const std::function<void()>& call, const char* text) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what()).find(text) != std::string::npos;
    }
    return false;
  };
  for (const bool in_nodes : {true, false}) {
    if (!in_nodes && gpus < 2) continue;
    const auto body = [&](int rank) {
      if (in_nodes) play_two_nodes(rank);
      NcclOptions wanted = options(20000);
      wanted.ranks_per_node = in_nodes ? 1 : kOneNode;
      NcclWorld world(wanted);
      ExchangeConfig config = config_for(group_of(6));
      if (rank == 1) config.H = 1024;
      if (!refused([&] { check_group_config(world.host_fabric(), config, block_placement(config.E, 2)); }, "H is 512 on rank 0, but 1024 on rank 1")) return 1;
      if (!refused([&] { (void)world.window("rows", rank == 1 ? 512 : 256); }, "one size on all ranks, got 256 to 512")) return 2;
      if (!refused([&] { (void)world.window("rows", std::size_t{1} << 40); }, "does not fit")) return 3;
      return 0;
    };
    EXPECT_THAT(run_processes(2, body), ::testing::Each(0)) << in_nodes;
  }
  SharedCount refused_arena, refused_memory;
  const auto other_arena = [&](int rank) -> int {
    play_two_nodes(rank);
    NcclOptions wanted = options(20000);
    wanted.ranks_per_node = 1, wanted.arena_bytes += static_cast<std::size_t>(rank) << 22;
    const bool is_refused = refused([&] { const NcclWorld world(wanted); }, "the arenas of all ranks must have one size, got 69206016 to 73400320 bytes");
    refused_arena.pass_and_wait_for(2);
    ::_exit(is_refused ? 0 : 1);
  };
  EXPECT_THAT(run_processes(2, other_arena), ::testing::Each(0));
  const auto large_arena = [&](int rank) -> int {
    play_two_nodes(rank);
    NcclOptions wanted = options(20000);
    wanted.ranks_per_node = 1, wanted.arena_bytes = std::size_t{1} << 42;
    const bool is_refused = refused([&] { const NcclWorld world(wanted); }, "rank 1 has no memory for an arena of");
    refused_memory.pass_and_wait_for(2);
    ::_exit(is_refused ? 0 : 1);
  };
  EXPECT_THAT(run_processes(2, large_arena), ::testing::Each(0));
}

TEST(NcclTransportCuda, HostCollectivesBetweenTwoNodes) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  const auto body = [](int rank) {
    play_two_nodes(rank);
    const ProcessRank self = process_rank();
    const NcclLibrary& nccl = nccl_library();
    WB_TRY_CUDA(cudaSetDevice(0));
    ncclUniqueId id{};
    if (rank == 0) WB_TRY_NCCL(nccl.get_unique_id(&id));
    hand_out(self, &id, sizeof(id), std::chrono::milliseconds(10000));
    ncclComm_t started = nullptr;
    WB_TRY_NCCL(nccl.comm_init_rank(&started, 2, id, rank));
    const NcclComm comm(started);
    int wrong = 0;
    {
      const auto fabric =
          make_caller_fabric(std::make_unique<NcclTransport>(nccl, comm, 2, plain_wait(nccl, comm, std::chrono::milliseconds(10000))), 2, rank, {});
      fabric->barrier("start");
      std::int64_t sums[] = {rank + 1, 10 * (rank + 1)};
      fabric->all_reduce(std::span<std::int64_t>(sums), ReduceOp::kSum, "sums");
      wrong += sums[0] != 3 || sums[1] != 30 ? 1 : 0;
      std::vector<int> own(1000, rank + 7), all(2000);
      fabric->all_gather(own.data(), all.data(), 4000, "gather");
      wrong += all[0] != 7 || all[1999] != 8 ? 2 : 0;
      int value = rank == 1 ? 42 : 0;
      fabric->broadcast(&value, sizeof(value), 1, "broadcast");
      wrong += value != 42 ? 4 : 0;
    }
    WB_TRY_NCCL(nccl.comm_destroy(started));
    return wrong;
  };
  EXPECT_THAT(run_processes(2, body), ::testing::Each(0));
}

TEST(ExchangeNccl, RanksThatDoNotReachEachOtherAreRefused) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  SharedCount passed;
  const auto body = [&](int rank) {
    play_two_nodes(rank);
    try {
      NcclWorld world(options(10000));
    } catch (const Error& error) {
      passed.pass_and_wait_for(2);
      if (std::string(error.what()).find("reaches the memory of 1 of 2 ranks") != std::string::npos) ::_exit(0);
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      ::_exit(2);
    }
    return 1;
  };
  EXPECT_THAT(run_processes(2, body), ::testing::Each(0));
}

// Two steps eager, the second route also replayed from a graph; beside the CPU engine's two-level exchange.
int run_two_level(int rank, int P, int per_node, int ranks_per_node) {
  play_node(rank, per_node);
  NcclWorld world(NcclOptions{std::size_t{64} << 20, std::chrono::milliseconds(30000), ranks_per_node});
  if (world.ranks_per_node() != per_node || world.num_nodes() != P / per_node || world.node() != rank / per_node) return 1;
  ExchangeConfig config = two_level_group(P, 1).config();
  config.T_max = kNodeTokens, config.combine_wire = CombineWire::kBF16;
  NodeGpu gpu(
      config, world.rail(), world.local_ranks(), world.device(), [&](const std::string& name, std::size_t bytes) { return world.window(name, bytes); },
      [&](int, std::uint64_t offset) { return world.at<void>(offset); });
  world.host_fabric().barrier("rank is there");
  const CudaStream& stream = gpu.stream();
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    const ts::Group group = two_level_group(P, seed);
    const ts::RankResult want = run_two_level_on_cpu(group, config, per_node)[static_cast<std::size_t>(rank)];
    gpu.upload(0, group, rank);
    gpu.queue(stream);
    if (gpu.out(0) != want.out || gpu.d_weights(0) != want.d_weights || gpu.rows(0) != want.handle.layout.R()) return 2;
    if (seed == 1) continue;
    const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t s) { gpu.queue(s); });
    for (int i = 0; i < 20; ++i) graph.launch(stream);
    stream.synchronize();
    if (gpu.out(0) != want.out) return 3;
  }
  return world.first_error().empty() ? 0 : 4;
}

TEST(TwoLevelNccl, TwoNodesOfOneRankOnOneGpu) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  EXPECT_THAT(run_processes(2, [](int rank) { return run_two_level(rank, 2, 1, kNodesByTopology); }), ::testing::Each(0));
}

TEST(TwoLevelNccl, TwoNodesOfTwoRanksOnTwoGpus) {
  WB_NEEDS_TWO_NCCL_GPUS();
  for (const int ranks_per_node : {kNodesByTopology, 2}) {
    EXPECT_THAT(run_processes(4, [&](int rank) { return run_two_level(rank, 4, 2, ranks_per_node); }), ::testing::Each(0)) << ranks_per_node;
  }
}

TEST(NcclLibrary, AnotherVersionIsRefusedWithBoth) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const int code = run_processes(1, [&](int) {
    ::setenv("WAYBILL_NCCL_LIBRARY", (folder / "libother_nccl.so").c_str(), 1);
    try {
      (void)nccl_library();
    } catch (const Error& error) {
      const std::string text = error.what();
      const bool names_both =
          text.find("header of NCCL " + nccl_version_text(NCCL_VERSION_CODE)) != std::string::npos && text.find("found is 2.1.7") != std::string::npos;
      if (!names_both) std::fprintf(stderr, "%s\n", text.c_str());
      return error.code() == ErrorCode::kUnsupported && names_both ? 0 : 1;
    }
    return 2;
  })[0];
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace waybill::cuda
