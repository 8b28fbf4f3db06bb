// SPDX-License-Identifier: Apache-2.0
// The owners and helpers of core/cuda.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>

#include "core/cuda/device_report.h"
#include "core/cuda/driver_function.h"
#include "core/cuda/num_sms.h"
#include "core/cuda/work_room.h"
#include "cuda/router_harness.h"

namespace waybill::cuda {
namespace {

using ::testing::HasSubstr;

TEST(CoreCuda, AnImpossibleAllocationSaysHowMuchWasFree) {
  WB_NEEDS_GPU();
  try {
    const DeviceBuffer buffer(std::size_t{1} << 46);
    FAIL() << "64 TiB were allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), HasSubstr("cannot allocate 70368744177664 bytes on cuda:0"));
  }
  const DeviceBuffer small(64);  // the failed call left no error behind
  small.fill(1);
}

TEST(CoreCuda, AFailedCallNamesTheCallAndTheError) {
  WB_NEEDS_GPU();
  try {
    WB_TRY_CUDA(cudaSetDevice(1000));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCuda);
    EXPECT_THAT(error.what(), HasSubstr("cudaSetDevice(1000) failed: cudaErrorInvalidDevice"));
  }
}

TEST(CoreCuda, GraphsReplayAndAThrowEndsTheCapture) {
  WB_NEEDS_GPU();
  const CudaStream stream;
  const DeviceBuffer buffer(4);
  EXPECT_THROW(GraphExec::capture(stream, [](cudaStream_t) { throw std::runtime_error("inside"); }), std::runtime_error);
  const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t s) { buffer.fill(7, s); });
  buffer.fill(0, stream);
  graph.launch(stream);
  std::uint32_t value = 0;
  buffer.download(&value, 4, stream);
  stream.synchronize();
  EXPECT_EQ(value, 0x07070707u);
}

TEST(CoreCuda, TheStatusWordIsClearAtFirstAndRoundTrips) {
  WB_NEEDS_GPU();
  const DeviceStatus status;
  const CudaStream stream;
  const StatusWord word = status.read(stream);
  EXPECT_EQ(word.flags, kStatusOk);
  EXPECT_EQ(word.timeout_rank, -1);
  EXPECT_EQ(word.num_short_rows, 0);
}

TEST(CoreCuda, AnErrorOfTheDriverHasItsNameAndASentence) {
  WB_NEEDS_GPU();
  EXPECT_EQ(driver_error_text(CUDA_ERROR_INVALID_VALUE), "CUDA_ERROR_INVALID_VALUE (invalid argument)");
  EXPECT_EQ(driver_error_text(static_cast<CUresult>(123456)), "unknown error (no text)");
  EXPECT_THAT([] { driver_function<void()>("cuNoSuchFunction", 12000); }, ::testing::ThrowsMessage<Error>(HasSubstr("the driver has no cuNoSuchFunction")));
}

// A graph holds the room that its capture saw; a call that wants more later gets other memory, and nobody gets the graph's.
TEST(CoreCuda, AWorkRoomThatGrowsAfterACaptureLeavesTheGraphItsMemory) {
  WB_NEEDS_GPU();
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  std::vector<std::unique_ptr<CudaStream>> streams;  // until one whose handle no test before has used
  do streams.push_back(std::make_unique<CudaStream>());
  while (work_room(0, *streams.back()).bytes() > 0);
  const CudaStream& stream = *streams.back();
  ScratchBuffer& room = work_room(0, stream);
  room.reserve(kBytes, /*zero=*/false, 0, stream);
  const DeviceBuffer seen(kBytes);
  const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t s) {
    room.reserve(kBytes, /*zero=*/false, 0, s);
    WB_TRY_CUDA(cudaMemsetAsync(room.data(), 0x5a, kBytes, s));
    WB_TRY_CUDA(cudaMemcpyAsync(seen.data(), room.data(), kBytes, cudaMemcpyDeviceToDevice, s));
  });
  void* const held = room.data();
  room.reserve(2 * kBytes, /*zero=*/false, 0, stream);
  EXPECT_NE(room.data(), held);
  std::vector<std::unique_ptr<ScratchBuffer>> others;
  for (int i = 0; i < 8; ++i) {
    others.push_back(std::make_unique<ScratchBuffer>());
    others.back()->reserve(kBytes, /*zero=*/true, 0, stream);
    EXPECT_NE(others.back()->data(), held) << "memory of a graph was given away";
  }
  WB_TRY_CUDA(cudaMemsetAsync(room.data(), 0x11, 2 * kBytes, stream));
  graph.launch(stream);
  std::vector<unsigned char> graphs(kBytes), mine(2 * kBytes), theirs(kBytes);
  seen.download(graphs.data(), kBytes, stream);
  WB_TRY_CUDA(cudaMemcpyAsync(mine.data(), room.data(), mine.size(), cudaMemcpyDeviceToHost, stream));
  WB_TRY_CUDA(cudaMemcpyAsync(theirs.data(), others[0]->data(), theirs.size(), cudaMemcpyDeviceToHost, stream));
  stream.synchronize();
  EXPECT_TRUE(std::all_of(graphs.begin(), graphs.end(), [](unsigned char b) { return b == 0x5a; }));
  EXPECT_TRUE(std::all_of(mine.begin(), mine.end(), [](unsigned char b) { return b == 0x11; }));
  EXPECT_TRUE(std::all_of(theirs.begin(), theirs.end(), [](unsigned char b) { return b == 0; }));
}

TEST(CoreCuda, TheCountOfSMsIsTheDevices) {
  WB_NEEDS_GPU();
  cudaDeviceProp properties{};
  WB_TRY_CUDA(cudaGetDeviceProperties(&properties, 0));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(num_sms(0), properties.multiProcessorCount);  // asked for, then remembered
  EXPECT_EQ(num_sms(), properties.multiProcessorCount);
  EXPECT_EQ(num_sms_or(7), properties.multiProcessorCount);
  EXPECT_THROW((void)num_sms(1000), Error);
}

TEST(CoreCuda, TheReportNamesTheGpuAndWhatRunsOnIt) {
  const DeviceReport report = device_report();
  const std::string text = describe(report);
  if (!has_gpu()) {
    EXPECT_THAT(text, HasSubstr("no GPU can be used"));
    return;
  }
  ASSERT_FALSE(report.gpus.empty());
  EXPECT_THAT(text, HasSubstr(report.gpus[0].name));
  EXPECT_THAT(text, ::testing::AnyOf(HasSubstr("sm_90a kernels"), HasSubstr("portable kernels")));
  std::fputs(text.c_str(), stdout);
}

TEST(CoreCuda, NcclHeaderAndLibraryThatDifferAreNamedWithTheMend) {
  EXPECT_EQ(compare_nccl(22809, 22809).level, Finding::kOk);
  EXPECT_EQ(compare_nccl(0, 22809).level, Finding::kOk);
  EXPECT_EQ(compare_nccl(22809, 0).level, Finding::kOk);
  const Finding older = compare_nccl(22809, 22707), newer = compare_nccl(22809, 23001), other = compare_nccl(30000, 22809);
  EXPECT_EQ(older.level, Finding::kError);
  EXPECT_THAT(older.text, HasSubstr("built with the header of 2.28.9, the library found is 2.27.7"));
  EXPECT_THAT(older.mend, HasSubstr("LD_LIBRARY_PATH"));
  EXPECT_EQ(newer.level, Finding::kWarning);
  EXPECT_EQ(other.level, Finding::kError);
}

}  // namespace
}  // namespace waybill::cuda
