// SPDX-License-Identifier: Apache-2.0
// cuda_local behind Fabric: device memory in collectives, windows, launches in which ranks meet, timeouts on the device.
#include <gmock/gmock.h>

#include <atomic>

#include "cuda/fabric_kernels.h"
#include "cuda/router_harness.h"
#include "fabric/cuda_local/cuda_local_fabric.h"

namespace waybill::cuda {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

// GPU 0 alone, and all GPUs where there are several.
std::vector<std::vector<int>> device_sets() {
  std::vector<std::vector<int>> sets{{0}};
  if (const std::vector<int> all = all_devices(4); all.size() > 1) sets.push_back(all);
  return sets;
}

TEST(CudaLocalFabric, AllToAllMovesDeviceAndHostMemory) {
  WB_NEEDS_GPU();
  for (const std::vector<int>& devices : device_sets()) {
    CudaLocalOptions options;
    options.devices = devices;
    constexpr int P = 8;
    run_cuda_ranks(
        P,
        [&](CudaLocalFabric& fabric) {
          const auto mine = static_cast<std::size_t>(fabric.rank());
          // Rank r sends r * 1000 + p in (r + 2 p) % 7 * 300 words to rank p; even receivers give device memory, odd ones host memory.
          const auto words = [](std::size_t from, std::size_t to) { return (from + 2 * to) % 7 * 300; };
          std::vector<DeviceBuffer> sent(P), received(P);
          std::vector<std::vector<std::uint32_t>> host(P);
          std::vector<Fabric::Span> send(P), receive(P);
          for (std::size_t p = 0; p < P; ++p) {
            const std::vector<std::uint32_t> values(words(mine, p), static_cast<std::uint32_t>(mine * 1000 + p));
            sent[p] = DeviceBuffer(values.size() * 4 + 4, fabric.device());
            sent[p].upload(values.data(), values.size() * 4, fabric.stream());
            host[p].assign(words(p, mine), 0);
            received[p] = DeviceBuffer(host[p].size() * 4 + 4, fabric.device());
            send[p] = {sent[p].data(), values.size() * 4};
            receive[p] = {mine % 2 == 0 ? received[p].data() : static_cast<void*>(host[p].data()), host[p].size() * 4};
            WB_TRY_CUDA(cudaStreamSynchronize(fabric.stream()));  // `values` dies here
          }
          fabric.all_to_all(send, receive, "rows");
          for (std::size_t p = 0; p < P; ++p) {
            if (mine % 2 == 0) WB_TRY_CUDA(cudaMemcpy(host[p].data(), received[p].data(), host[p].size() * 4, cudaMemcpyDeviceToHost));
            for (const std::uint32_t value : host[p]) ASSERT_EQ(value, p * 1000 + mine);
          }
        },
        options);
  }
}

TEST(CudaLocalFabric, WindowsAreOneOffsetAndLaunchesMeetAllRanks) {
  WB_NEEDS_GPU();
  for (const std::vector<int>& devices : device_sets()) {
    for (const int P : {1, 4, 36}) {
      if (static_cast<std::size_t>(P) < devices.size()) continue;
      CudaLocalOptions options;
      options.devices = devices;
      std::atomic<std::uint64_t> offset{0};
      std::atomic<int> errors_seen{0};
      run_cuda_ranks(
          P,
          [&](CudaLocalFabric& fabric) {
            const std::uint64_t stamps = fabric.window("stamps", kMaxDevicePeers * 4), errors = fabric.window("errors", 4);
            if (fabric.rank() == 0) offset = errors;
            WB_TRY_CUDA(cudaMemsetAsync(fabric.at<int>(fabric.rank(), errors), 0, 4, fabric.stream()));
            for (int round = 0; round < 3; ++round) {
              fabric.launch_together(
                  "exchange", [&](const LocalRanks& ranks, cudaStream_t stream) { launch_stamp_exchange(ranks, stamps, errors, 1, 10 + round, -1, stream); });
              fabric.device_barrier("between", 3);
            }
            fabric.synchronize("end");
            EXPECT_EQ(offset.load(), errors);
            int count = -1;
            WB_TRY_CUDA(cudaMemcpy(&count, fabric.at<int>(fabric.rank(), errors), 4, cudaMemcpyDeviceToHost));
            errors_seen += count;
          },
          options);
      EXPECT_EQ(errors_seen.load(), 0) << P;
    }
  }
}

// What a rank queues on its stream before a device barrier is seen by what any rank queues after it.
TEST(CudaLocalFabric, ADeviceBarrierOrdersTheStreamsOfAllRanks) {
  WB_NEEDS_GPU();
  constexpr int P = 4;
  for (const std::vector<int>& devices : device_sets()) {
    CudaLocalOptions options;
    options.devices = devices;
    run_cuda_ranks(
        P,
        [&](CudaLocalFabric& fabric) {
          constexpr std::size_t kBytes = std::size_t{1} << 17;
          const std::uint64_t window = fabric.window("bytes", kBytes);
          DeviceBuffer copy(kBytes, fabric.device());
          for (int round = 1; round <= 10; ++round) {
            WB_TRY_CUDA(cudaMemsetAsync(fabric.at<void>(fabric.rank(), window), round * P + fabric.rank(), kBytes, fabric.stream()));
            fabric.device_barrier("written", 1);
            const int peer = (fabric.rank() + 1) % P;
            WB_TRY_CUDA(cudaMemcpyAsync(copy.data(), fabric.at<void>(peer, window), kBytes, cudaMemcpyDefault, fabric.stream()));
            fabric.device_barrier("read", 2);
            std::vector<unsigned char> host(kBytes);
            copy.download(host.data(), kBytes, fabric.stream());
            fabric.synchronize("check");
            for (const unsigned char byte : host) ASSERT_EQ(byte, round * P + peer);
          }
        },
        options);
  }
}

TEST(CudaLocalFabric, AWaitOnTheDeviceThatRunsOutIsATimeoutOnEveryRankAndTheGroupGoesOn) {
  WB_NEEDS_GPU();
  for (const std::vector<int>& devices : device_sets()) {
    CudaLocalOptions options;
    options.devices = devices, options.fabric.timeout = milliseconds(300);
    std::atomic<int> timeouts{0};
    run_cuda_ranks(
        4,
        [&](CudaLocalFabric& fabric) {
          const std::uint64_t stamps = fabric.window("stamps", kMaxDevicePeers * 4), errors = fabric.window("errors", 4);
          fabric.launch_together("exchange",
                                 [&](const LocalRanks& ranks, cudaStream_t stream) { launch_stamp_exchange(ranks, stamps, errors, 1, 1, 2, stream); });
          try {
            fabric.synchronize("step");
            ADD_FAILURE() << "no timeout";
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::kTimeout);
            EXPECT_THAT(error.what(), AllOf(HasSubstr("phase 7"), HasSubstr("waited for rank 2, expected 1, saw 0")));
            ++timeouts;
          }
          fabric.barrier("again");
          fabric.device_barrier("again", 4);
          fabric.synchronize("again");
        },
        options);
    EXPECT_EQ(timeouts.load(), 4);
  }
}

TEST(CudaLocalFabric, WindowsThatDifferOrDoNotFitAreRefusedOnEveryRank) {
  WB_NEEDS_GPU();
  std::atomic<int> refused{0};
  CudaLocalOptions options;
  options.arena_bytes = 4096;
  run_cuda_ranks(
      3,
      [&](CudaLocalFabric& fabric) {
        for (const bool differ : {true, false}) {
          try {
            fabric.window("rows", differ ? 16u + static_cast<unsigned>(fabric.rank()) : 8192u);
            ADD_FAILURE();
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), differ ? ErrorCode::kInvalidArgument : ErrorCode::kOutOfMemory);
            EXPECT_THAT(error.what(), HasSubstr(differ ? "got 16 to 18 bytes" : "rows of 8192 bytes does not fit"));
            ++refused;
          }
        }
      },
      options);
  EXPECT_EQ(refused.load(), 6);
  EXPECT_THROW(run_cuda_ranks(0, [](CudaLocalFabric&) {}), Error);
  EXPECT_THROW(run_cuda_ranks(73, [](CudaLocalFabric&) {}), Error);
}

}  // namespace
}  // namespace waybill::cuda
