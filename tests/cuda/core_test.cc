// SPDX-License-Identifier: Apache-2.0
// The owners and helpers of core/cuda.
#include <gmock/gmock.h>

#include "core/cuda/device_report.h"
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
