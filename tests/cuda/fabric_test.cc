// SPDX-License-Identifier: Apache-2.0
// cuda_local on one GPU, and with ranks spread over several: windows, barriers under replay, timeouts that name the late rank.
#include <gmock/gmock.h>

#include <deque>

#include "cuda/fabric_kernels.h"
#include "cuda/router_harness.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::cuda {
namespace {

constexpr int kDevices[] = {0};

int total_errors(const CudaLocalGroup& group, std::uint64_t errors) {
  int total = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    int count = 0;
    WB_TRY_CUDA(cudaMemcpy(&count, group.at<int>(rank, errors), sizeof(count), cudaMemcpyDeviceToHost));
    total += count;
  }
  return total;
}

class CudaLocal : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaLocal, ::testing::Values(1, 2, 4, 8, 36, 72));

TEST_P(CudaLocal, EveryRankSeesEveryStampAfterTheBarrierEagerAndReplayed) {
  WB_NEEDS_GPU();
  const int P = GetParam(), ctas = P >= 36 ? 1 : 4;
  CudaLocalGroup group(P, kDevices, 1 << 20);
  const std::uint64_t window = group.window("stamps", static_cast<std::size_t>(ctas) * kMaxDevicePeers * 4), errors = group.window("errors", 4);
  for (int rank = 0; rank < P; ++rank) WB_TRY_CUDA(cudaMemset(group.at<int>(rank, errors), 0, 4));
  const CudaStream stream;
  WB_TRY_CUDA(cudaDeviceSynchronize());
  const LocalRanks ranks = local_ranks(group, 0);
  ASSERT_EQ(ranks.count, P);
  for (int round = 0; round < 5; ++round) launch_stamp_exchange(ranks, window, errors, ctas, 100 + round, -1, stream);
  stream.synchronize();
  EXPECT_EQ(total_errors(group, errors), 0);
  const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t s) {
    launch_stamp_exchange(ranks, window, errors, ctas, 500, -1, s);
    const cudaStream_t streams[] = {s};
    launch_group_barrier(group, 9, ctas, streams);
  });
  for (int replay = 0; replay < 50; ++replay) graph.launch(stream);
  stream.synchronize();
  EXPECT_EQ(total_errors(group, errors), 0);
  EXPECT_EQ(group.first_error(), "");
  std::uint32_t epoch = 0;
  WB_TRY_CUDA(cudaMemcpy(&epoch, &group.at<DeviceControl>(P - 1, 0)->epoch[0], 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(epoch, 5u * 2u + 50u * 3u);
}

// Kernels on all GPUs at once meet each other: one launch a GPU, on a stream of that GPU.
class CudaLocalGpus : public ::testing::TestWithParam<int> {
 protected:
  // A stream of each GPU.
  static void make_streams(const std::vector<int>& devices, std::deque<CudaStream>& streams) {
    for (const int device : devices) streams.emplace_back(device);
  }
  template <class Body>
  static void on_each(const std::vector<int>& devices, const Body& body) {
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const DeviceGuard guard(devices[d]);
      body(d);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, CudaLocalGpus, ::testing::Values(2, 5, 8, 36, 72));

TEST_P(CudaLocalGpus, RanksOfSeveralGpusSeeEveryStampAfterTheBarrierEagerAndReplayed) {
  const int P = GetParam();
  const std::vector<int> devices = all_devices(std::min(P, 4));
  if (devices.size() < 2) GTEST_SKIP() << "needs two GPUs";
  CudaLocalGroup group(P, devices, 1 << 20);
  const std::uint64_t window = group.window("stamps", kMaxDevicePeers * 4), errors = group.window("errors", 4);
  for (int rank = 0; rank < P; ++rank) {
    const DeviceGuard guard(group.device_of(rank));
    WB_TRY_CUDA(cudaMemset(group.at<int>(rank, errors), 0, 4));
  }
  std::deque<CudaStream> streams;
  make_streams(devices, streams);
  on_each(devices, [&](std::size_t) { WB_TRY_CUDA(cudaDeviceSynchronize()); });
  int on_first = 0;
  for (int rank = 0; rank < P; ++rank) on_first += group.device_of(rank) == devices[0];
  EXPECT_LT(on_first, P);
  for (int round = 0; round < 5; ++round) {
    on_each(devices, [&](std::size_t d) { launch_stamp_exchange(local_ranks(group, devices[d]), window, errors, 1, 100 + round, -1, streams[d]); });
  }
  std::vector<GraphExec> graphs;
  on_each(devices, [&](std::size_t d) {
    graphs.push_back(
        GraphExec::capture(streams[d], [&](cudaStream_t s) { launch_stamp_exchange(local_ranks(group, devices[d]), window, errors, 1, 500, -1, s); }));
  });
  for (int replay = 0; replay < 50; ++replay) on_each(devices, [&](std::size_t d) { graphs[d].launch(streams[d]); });
  std::vector<cudaStream_t> plain;
  for (const CudaStream& stream : streams) plain.push_back(stream.get());
  launch_group_barrier(group, 9, 1, plain);
  on_each(devices, [&](std::size_t d) { streams[d].synchronize(); });
  EXPECT_EQ(group.first_error(), "");
  EXPECT_EQ(total_errors(group, errors), 0);
  for (int rank = 0; rank < P; ++rank) {
    std::uint32_t epoch = 0;
    WB_TRY_CUDA(cudaMemcpy(&epoch, &group.at<DeviceControl>(rank, 0)->epoch[0], 4, cudaMemcpyDefault));
    EXPECT_EQ(epoch, 55u * 2u + 1u) << rank;
  }
}

TEST_P(CudaLocalGpus, ALateRankOfAnotherGpuIsNamed) {
  const int P = GetParam(), late = P - 1;
  const std::vector<int> devices = all_devices(std::min(P, 4));
  if (devices.size() < 2) GTEST_SKIP() << "needs two GPUs";
  CudaLocalGroup group(P, devices, 1 << 16, std::chrono::milliseconds(100));
  const std::uint64_t window = group.window("stamps", kMaxDevicePeers * 4), errors = group.window("errors", 4);
  std::deque<CudaStream> streams;
  make_streams(devices, streams);
  on_each(devices, [&](std::size_t d) { launch_stamp_exchange(local_ranks(group, devices[d]), window, errors, 1, 1, late, streams[d]); });
  on_each(devices, [&](std::size_t d) { streams[d].synchronize(); });
  EXPECT_THAT(group.first_error(), ::testing::HasSubstr(fmt::format("waited for rank {}, expected 1, saw 0", late)));
  for (int rank = 0; rank < late; ++rank) EXPECT_NE(group.error(rank).state, 0u) << rank;
}

TEST(CudaLocalErrors, ARankThatNeverComesIsNamedAndNobodyHangs) {
  WB_NEEDS_GPU();
  CudaLocalGroup group(4, kDevices, 1 << 16, std::chrono::milliseconds(20));
  const std::uint64_t window = group.window("stamps", kMaxDevicePeers * 4), errors = group.window("errors", 4);
  const CudaStream stream;
  launch_stamp_exchange(local_ranks(group, 0), window, errors, 1, 1, 2, stream);
  stream.synchronize();
  EXPECT_THAT(group.first_error(), ::testing::HasSubstr("phase 7"));
  EXPECT_THAT(group.first_error(), ::testing::HasSubstr("waited for rank 2, expected 1, saw 0"));
  for (const int rank : {0, 1, 3}) {
    EXPECT_NE(group.error(rank).state, 0u) << rank;
    EXPECT_EQ(group.error(rank).phase, 7) << rank;
  }
  group.clear_errors();
  for (int rank = 0; rank < 4; ++rank) WB_TRY_CUDA(cudaMemset(group.at<int>(rank, errors), 0, 4));
  launch_stamp_exchange(local_ranks(group, 0), window, errors, 1, 1, -1, stream);
  stream.synchronize();
  EXPECT_EQ(group.first_error(), "");
  EXPECT_EQ(total_errors(group, errors), 0);
}

TEST(CudaLocalErrors, WhatCannotWorkIsRefusedWithItsValues) {
  WB_NEEDS_GPU();
  EXPECT_THROW(CudaLocalGroup(0, kDevices, 1024), Error);
  EXPECT_THROW(CudaLocalGroup(73, kDevices, 1024), Error);
  CudaLocalGroup group(2, kDevices, 4096);
  try {
    group.window("too large", 8192);
    FAIL() << "a window larger than the arena was booked";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("too large of 8192 bytes"));
  }
  EXPECT_THROW(group.check_co_residency(group_barrier_kernel(), kBarrierThreads, 0, 1 << 20), Error);
}

}  // namespace
}  // namespace waybill::cuda
