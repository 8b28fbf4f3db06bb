// SPDX-License-Identifier: Apache-2.0
// group_rows() on CUDA tensors: offsets, zeros behind the last group and nowhere else, sizes that cannot be; scratch of a first call inside a capture.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "core/cuda/cuda_error.h"
#include "core/cuda/graph.h"
#include "core/cuda/scratch_buffer.h"
#include "cuda/gemm_harness.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "waybill/group_rows.h"

namespace waybill::cuda {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

struct Result {
  std::vector<std::int32_t> offsets;
  std::vector<unsigned char> bytes;  // of the rows, and 64 before and behind them
};

// Rows of `columns` 2-byte elements, 0xcd before the call.
Result run(const std::vector<std::int32_t>& sizes, std::int64_t S, std::int64_t columns, bool captured) {
  const std::size_t L = sizes.size(), row_bytes = static_cast<std::size_t>(S * columns) * 2;
  const DeviceBuffer device_sizes(L * 4 + 4), device_offsets(L * 4 + 4), rows(row_bytes + 128);
  const CudaStream stream;
  device_sizes.upload(sizes.data(), L * 4, stream), device_offsets.fill(0xcd, stream), rows.fill(0xcd, stream);
  GroupRowsArgs args;
  args.sizes = TensorView(device_sizes.data(), DType::kI32, {static_cast<std::int64_t>(L)}, kGpu);
  args.offsets = TensorView(device_offsets.data(), DType::kI32, {static_cast<std::int64_t>(L) + 1}, kGpu);
  args.rows = TensorView(rows.as<unsigned char>() + 64, DType::kBF16, {S, columns}, kGpu);
  args.S = S;
  const auto call = [&](cudaStream_t s) { group_rows(args, Stream{kGpu, s, nullptr}); };
  if (captured) {
    const GraphExec graph = GraphExec::capture(stream, call);
    graph.launch(stream);
    stream.synchronize();
  } else {
    call(stream);
  }
  Result result{std::vector<std::int32_t>(L + 1), std::vector<unsigned char>(row_bytes + 128)};
  device_offsets.download(result.offsets.data(), L * 4 + 4, stream), rows.download(result.bytes.data(), result.bytes.size(), stream);
  stream.synchronize();
  return result;
}

void expect(const Result& got, const std::vector<std::int32_t>& offsets, std::int64_t S, std::int64_t columns) {
  EXPECT_EQ(got.offsets, offsets);
  const std::size_t first = 64 + static_cast<std::size_t>(offsets.back() * columns) * 2, end = 64 + static_cast<std::size_t>(S * columns) * 2;
  for (std::size_t i = 0; i < got.bytes.size(); ++i)
    ASSERT_EQ(got.bytes[i], i >= first && i < end ? 0 : 0xcd) << "byte " << i << " of rows " << S << " x " << columns;
}

TEST(GroupRowsCuda, OffsetsAndZerosOfAnySizes) {
  WB_NEEDS_HOPPER();
  register_gemm();
  std::mt19937 random(3);
  for (const std::size_t L : {0u, 1u, 3u, 255u, 256u, 257u, 1152u}) {
    for (const std::int64_t columns : {1, 3, 8, 129}) {
      std::vector<std::int32_t> sizes(L), offsets(L + 1, 0);
      for (auto& size : sizes) size = random() % 4 == 0 ? 0 : static_cast<std::int32_t>(random() % 9);
      std::partial_sum(sizes.begin(), sizes.end(), offsets.begin() + 1);
      for (const std::int64_t tail : {0, 1, 77}) {
        for (const bool captured : {false, true}) expect(run(sizes, offsets.back() + tail, columns, captured), offsets, offsets.back() + tail, columns);
      }
    }
  }
}

TEST(GroupRowsCuda, SizesThatCannotBeStayInside) {
  WB_NEEDS_HOPPER();
  register_gemm();
  expect(run({5, -3, 4}, 10, 8, false), {0, 5, 5, 9}, 10, 8);
  expect(run({5, 100, 4}, 10, 8, false), {0, 5, 10, 10}, 10, 8);
  expect(run({2147483647, 2147483647, 1}, 10, 8, false), {0, 10, 10, 10}, 10, 8);
}

TEST(ScratchBufferCuda, GrowsInsideOfACaptureAndKeepsWhatAGraphHolds) {
  WB_NEEDS_HOPPER();
  const CudaStream stream;
  ScratchBuffer scratch;
  const auto write = [&](std::size_t bytes, int value) {
    return GraphExec::capture(stream, [&](cudaStream_t s) {
      scratch.reserve(bytes, true, 0, s);
      WB_TRY_CUDA(cudaMemsetAsync(scratch.data(), value, bytes, s));
    });
  };
  const GraphExec small = write(1000, 1);
  void* const held = scratch.data();
  const GraphExec large = write(std::size_t{1} << 20, 2);
  ASSERT_NE(scratch.data(), held);
  large.launch(stream), small.launch(stream);  // the first graph's memory is still there
  std::vector<unsigned char> got(1000), other(1000);
  WB_TRY_CUDA(cudaMemcpyAsync(got.data(), held, got.size(), cudaMemcpyDeviceToHost, stream));
  WB_TRY_CUDA(cudaMemcpyAsync(other.data(), scratch.data(), other.size(), cudaMemcpyDeviceToHost, stream));
  stream.synchronize();
  EXPECT_EQ(std::count(got.begin(), got.end(), 1), 1000);
  EXPECT_EQ(std::count(other.begin(), other.end(), 2), 1000);
}

}  // namespace
}  // namespace waybill::cuda
