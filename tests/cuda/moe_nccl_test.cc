// SPDX-License-Identifier: Apache-2.0
// The MoE layer between processes over NCCL windows has the bits of two virtual ranks on one GPU.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdio>
#include <cstring>

#include "cuda/moe_harness.h"
#include "cuda/processes.h"

namespace waybill::cuda {
namespace {

MoeConfig nccl_config() {
  MoeConfig c = gpu_config(16, 4, 90);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 2;
  c.shared_F = 24, c.aux_coefficient = 1, c.z_coefficient = 0.1f;
  return c;
}

// One process's rank with its tensors.
struct NcclMoe {
  NcclMoe(NcclWorld& world, const MoeConfig& config, const mt::Weights<float>& weights)
      : c(config),
        stream(world.device()),
        layer(
            config, world.local_ranks(), world.device(), [&](const std::string& name, std::size_t bytes) { return world.window(name, bytes); },
            node_options(world)),
        step(layer.make_step()) {
    const int device = world.device();
    P = world.size();
    const std::int64_t L = c.L(P), T = c.T_max;
    const mt::RankWeights local = mt::slice(c, P, world.rank(), weights);
    const auto add = [&](TensorView& weight, TensorView& gradient, std::initializer_list<std::int64_t> shape, const std::vector<float>& values) {
      tensors.emplace_back(DType::kBF16, shape, device), tensors.back().set(values), weight = tensors.back().view;
      tensors.emplace_back(DType::kF32, shape, device), gradient = tensors.back().view;
    };
    add(w.gate, g.gate, {c.E, c.H}, local.w.gate);
    add(w.w1, g.w1, {L, c.inner_width(), c.H}, local.w.w1), add(w.w2, g.w2, {L, c.H, c.F}, local.w.w2);
    add(w.shared_w1, g.shared_w1, {c.shared_inner_width(), c.H}, local.w.shared_w1), add(w.shared_w2, g.shared_w2, {c.H, c.shared_F}, local.w.shared_w2);
    for (DeviceTensor* t : {&x, &d_out, &out, &dx}) *t = DeviceTensor(t == &x || t == &d_out ? DType::kBF16 : DType::kF32, {T, c.H}, device);
    world.host_fabric().barrier("rank is there");  // before any kernel posts to a peer
  }
  static DeviceMoeOptions node_options(NcclWorld& world) {
    DeviceMoeOptions options;
    options.nodes = world.num_nodes(), options.rail = &world.rail();
    return options;
  }
  void upload(const mt::Batch& batch, int rank) {
    const auto part = [&](const std::vector<float>& v) {
      const auto n = static_cast<std::ptrdiff_t>(c.T_max * c.H);
      return std::vector<float>(v.begin() + rank * n, v.begin() + (rank + 1) * n);
    };
    x.set(part(batch.x)), d_out.set(part(batch.d_out));
  }
  void queue(cudaStream_t s) {
    const MoeTensors weights[] = {w}, gradients[] = {g};
    const TensorView xs[] = {x.view}, outs[] = {out.view}, d_outs[] = {d_out.view}, dxs[] = {dx.view};
    DeviceMoeForward forward;
    forward.valid_tokens = static_cast<double>(P * c.T_max);
    layer.forward(weights, xs, outs, step, forward, s);
    layer.backward(weights, gradients, xs, d_outs, dxs, step, {}, s);
  }
  // What differs is named on stderr: the process that fails is not the one that reports.
  bool equals(const mt::Result& want, int rank, const std::string& when) {
    stream.synchronize();
    const auto same = [&](const char* name, const std::vector<float>& wanted, const std::vector<float>& got, std::size_t first) {
      std::size_t num_different = 0, first_different = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (std::memcmp(&wanted[first + i], &got[i], sizeof(float)) == 0) continue;
        if (num_different++ == 0) first_different = i;
      }
      if (num_different == 0) return true;
      std::fprintf(stderr, "rank %d, %s: %s differs in %zu of %zu values, first at %zu: %.9g instead of %.9g\n", rank, when.c_str(), name, num_different,
                   got.size(), first_different, static_cast<double>(got[first_different]), static_cast<double>(wanted[first + first_different]));
      return false;
    };
    const auto tokens = static_cast<std::size_t>(rank * c.T_max * c.H);
    const std::vector<float> w1 = DeviceTensor::read(g.w1), w2 = DeviceTensor::read(g.w2);
    bool all = same("out", want.out, out.get(), tokens);
    all = same("dx", want.dx, dx.get(), tokens) && all;
    all = same("dW1", want.gradients.w1, w1, static_cast<std::size_t>(rank) * w1.size()) && all;
    return same("dW2", want.gradients.w2, w2, static_cast<std::size_t>(rank) * w2.size()) && all;
  }

  MoeConfig c;
  int P = 1;
  CudaStream stream;
  DeviceMoeLayer layer;
  DeviceMoeStep step;
  std::vector<DeviceTensor> tensors;
  MoeTensors w, g;
  DeviceTensor x, d_out, out, dx;
};

TEST(MoeNccl, TwoProcessesHaveTheBitsOfTwoVirtualRanksEagerAndReplayed) {
  if (static const int gpus = gpus_for_nccl(); gpus < 2) GTEST_SKIP() << "needs 2 GPUs and NCCL, found " << gpus;
  const auto body = [](int rank) {
    register_moe_kernels();
    const MoeConfig c = nccl_config();
    NcclWorld world(NcclOptions{DeviceMoeLayer::arena_bytes(c, 2), std::chrono::milliseconds(20000)});
    const mt::Weights<float> w = bf16_weights(c, 5);
    std::vector<mt::Batch> batches;
    std::vector<mt::Result> want;
    {
      MoeGpuOptions options;
      options.devices = {world.device()};
      GpuMoe virtual_ranks(c, 2, w, options);
      for (std::uint64_t b = 0; b < 3; ++b) {
        batches.push_back(bf16_batch(c, {90, 90}, 10 * b));
        virtual_ranks.upload(batches[b]), virtual_ranks.step();
        want.push_back(virtual_ranks.result());
      }
    }
    NcclMoe mine(world, c, w);
    for (std::size_t b = 0; b < 3; ++b) {
      mine.upload(batches[b], rank);
      mine.queue(mine.stream);
      if (!mine.equals(want[b], rank, fmt::format("step {}", b))) return 1;
    }
    const GraphExec graph = GraphExec::capture(mine.stream, [&](cudaStream_t s) { mine.queue(s); });
    for (std::size_t i = 0; i < 30; ++i) {
      mine.upload(batches[i % 3], rank);
      graph.launch(mine.stream);
      if (!mine.equals(want[i % 3], rank, fmt::format("replay {}", i))) return 2;
    }
    world.host_fabric().barrier("done");
    return world.first_error().empty() ? 0 : 3;
  };
  EXPECT_THAT(run_processes(2, body), ::testing::Each(0));
}

// Nodes of `per_node` ranks that NCCL takes for separate machines, sockets between them; wanted are the bits of virtual nodes of one process.
int run_nodes(int rank, int P, int per_node, int ranks_per_node) {
  ::setenv("NCCL_HOSTID", fmt::format("node {}", rank / per_node).c_str(), 1), ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("LOCAL_RANK", std::to_string(rank % per_node).c_str(), 1);
  register_moe_kernels();
  MoeConfig c = nccl_config();
  c.hierarchy = Hierarchy::kTwoLevel;
  DeviceMoeOptions sizes;
  sizes.nodes = P / per_node;
  NcclWorld world(NcclOptions{DeviceMoeLayer::arena_bytes(c, P, sizes), std::chrono::milliseconds(30000), ranks_per_node});
  if (world.num_nodes() != P / per_node || world.ranks_per_node() != per_node) return 1;
  const mt::Weights<float> w = bf16_weights(c, 5);
  std::vector<mt::Batch> batches;
  std::vector<mt::Result> want;
  {
    MoeGpuOptions options;
    options.devices = {world.device()};
    MoeConfig reference = c;
    if (per_node == 1) {
      reference.hierarchy = Hierarchy::kFlat;  // one domain has these bits, too; as two_level its partial sums, which cross no node, would not be rounded
    } else {
      options.nodes = P / per_node;
    }
    GpuMoe virtual_ranks(reference, P, w, options);
    for (std::uint64_t b = 0; b < 3; ++b) {
      batches.push_back(bf16_batch(c, std::vector<std::int64_t>(static_cast<std::size_t>(P), 90), 10 * b));
      virtual_ranks.upload(batches[b]), virtual_ranks.step();
      want.push_back(virtual_ranks.result());
    }
  }
  NcclMoe mine(world, c, w);
  for (std::size_t b = 0; b < 3; ++b) {
    mine.upload(batches[b], rank);
    mine.queue(mine.stream), world.synchronize(mine.stream, "a step");
    if (!mine.equals(want[b], rank, fmt::format("step {}", b))) return 2;
  }
  {
    const GraphExec graph = GraphExec::capture(mine.stream, [&](cudaStream_t s) { mine.queue(s); });
    for (std::size_t i = 0; i < 9; ++i) {
      mine.upload(batches[i % 3], rank);
      graph.launch(mine.stream), world.synchronize(mine.stream, "a replay");
      if (!mine.equals(want[i % 3], rank, fmt::format("replay {}", i))) return 3;
    }
  }
  world.host_fabric().barrier("done");
  return world.first_error().empty() ? 0 : 4;
}

TEST(MoeNccl, TwoNodesOfOneRankOnOneGpuHaveTheBitsOfOneDomainEagerAndReplayed) {
  if (gpus_for_nccl() < 1) GTEST_SKIP() << "needs a GPU and NCCL " << NCCL_VERSION_CODE;
  EXPECT_THAT(run_processes(2, [](int rank) { return run_nodes(rank, 2, 1, kNodesByTopology); }), ::testing::Each(0));
}

TEST(MoeNccl, TwoNodesOfTwoRanksOnTwoGpusHaveTheBitsOfVirtualNodes) {
  if (static const int gpus = gpus_for_nccl(); gpus < 2) GTEST_SKIP() << "needs 2 GPUs and NCCL, found " << gpus;
  EXPECT_THAT(run_processes(4, [](int rank) { return run_nodes(rank, 4, 2, kNodesByTopology); }), ::testing::Each(0));
}

TEST(MoeNccl, FourRanksInForcedNodesOfTwoHaveTheBitsOfVirtualNodes) {
  if (static const int gpus = gpus_for_nccl(); gpus < 2) GTEST_SKIP() << "needs 2 GPUs and NCCL, found " << gpus;
  EXPECT_THAT(run_processes(4, [](int rank) { return run_nodes(rank, 4, 2, 2); }), ::testing::Each(0));
}

}  // namespace
}  // namespace waybill::cuda
