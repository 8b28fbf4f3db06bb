// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_transport.h"

#include <numeric>
#include <thread>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {
namespace {

int current_device() {
  int device = 0;
  WB_TRY_CUDA(cudaGetDevice(&device));
  return device;
}

void grow(DeviceBuffer& buffer, std::size_t bytes) {
  if (buffer.bytes() < bytes) buffer = DeviceBuffer(bytes * 2, current_device());
}

}  // namespace

NcclTransport::NcclTransport(ncclComm_t comm, int rank, int size, std::chrono::milliseconds timeout)
    : comm_(comm), rank_(rank), size_(size), timeout_(timeout), stream_(current_device()) {}

void NcclTransport::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) {
  const NcclLibrary& nccl = nccl_library();
  const auto total = [](std::span<const std::int64_t> bytes) { return static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})); };
  const std::size_t out = total(send_bytes), in = total(receive_bytes);
  grow(out_, out), grow(in_, in);
  out_.upload(send, out, stream_);
  WB_TRY_NCCL(nccl.group_start());
  std::size_t from = 0, to = 0;
  for (std::size_t p = 0; p < static_cast<std::size_t>(size_); ++p) {
    const auto sent = static_cast<std::size_t>(send_bytes[p]), got = static_cast<std::size_t>(receive_bytes[p]);
    if (sent > 0) WB_TRY_NCCL(nccl.send(out_.as<char>() + from, sent, ncclInt8, static_cast<int>(p), comm_, stream_));
    if (got > 0) WB_TRY_NCCL(nccl.receive(in_.as<char>() + to, got, ncclInt8, static_cast<int>(p), comm_, stream_));
    from += sent, to += got;
  }
  WB_TRY_NCCL(nccl.group_end());
  const auto end = std::chrono::steady_clock::now() + timeout_;
  for (cudaError_t state = cudaStreamQuery(stream_); state != cudaSuccess; state = cudaStreamQuery(stream_)) {
    if (state != cudaErrorNotReady) WB_TRY_CUDA(state);
    ncclResult_t error = ncclSuccess;
    WB_TRY_NCCL(nccl.comm_get_async_error(comm_, &error));
    if (error != ncclSuccess && error != ncclInProgress) throw_nccl_error(error, "a host collective");
    if (std::chrono::steady_clock::now() > end) {
      WB_FAIL(ErrorCode::kTimeout, "rank {} of {}: a host collective over NCCL took longer than {} ms", rank_, size_, timeout_.count());
    }
    std::this_thread::yield();
  }
  if (in > 0) WB_TRY_CUDA(cudaMemcpy(receive, in_.data(), in, cudaMemcpyDeviceToHost));
}

}  // namespace waybill::cuda
