// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_transport.h"

#include <numeric>
#include <thread>
#include <utility>

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

AwaitStream plain_wait(const NcclLibrary& nccl, const NcclComm& comm, std::chrono::milliseconds timeout) {
  return [&nccl, &comm, timeout](cudaStream_t stream, ncclResult_t refused) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    ncclResult_t error = refused;
    for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess;) {
      if (error != ncclSuccess && error != ncclInProgress) throw_nccl_error(error, "a host collective");
      state = cudaStreamQuery(stream);
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) WB_TRY_CUDA(state);
      if (std::chrono::steady_clock::now() > end) WB_FAIL(ErrorCode::kTimeout, "a host collective over NCCL took longer than {} ms", timeout.count());
      if (const NcclComm::Use use = comm.use(); use.get() != nullptr) WB_TRY_NCCL(nccl.comm_get_async_error(use.get(), &error));
      std::this_thread::yield();
    }
  };
}

NcclTransport::NcclTransport(const NcclLibrary& nccl, const NcclComm& comm, int size, AwaitStream wait)
    : nccl_(nccl), comm_(comm), size_(size), wait_(std::move(wait)), stream_(current_device()) {}

ncclResult_t NcclTransport::queue(std::span<const std::int64_t> send_bytes, std::span<const std::int64_t> receive_bytes) const {
  const NcclComm::Use use = comm_.use();
  const ncclComm_t comm = use.get();
  if (comm == nullptr) return ncclRemoteError;
  return in_one_group(nccl_, [&] {
    std::size_t from = 0, to = 0;
    for (std::size_t p = 0; p < static_cast<std::size_t>(size_); ++p) {
      const auto sent = static_cast<std::size_t>(send_bytes[p]), got = static_cast<std::size_t>(receive_bytes[p]);
      ncclResult_t queued = sent > 0 ? nccl_.send(out_.as<char>() + from, sent, ncclInt8, static_cast<int>(p), comm, stream_) : ncclSuccess;
      if (queued == ncclSuccess && got > 0) queued = nccl_.receive(in_.as<char>() + to, got, ncclInt8, static_cast<int>(p), comm, stream_);
      if (queued != ncclSuccess) return queued;
      from += sent, to += got;
    }
    return ncclSuccess;
  });
}

void NcclTransport::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) {
  const auto total = [](std::span<const std::int64_t> bytes) { return static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0})); };
  const std::size_t out = total(send_bytes), in = total(receive_bytes);
  grow(out_, out), grow(in_, in);
  out_.upload(send, out, stream_);
  const ncclResult_t refused = queue(send_bytes, receive_bytes);
  wait_(stream_, refused);
  if (in == 0) return;
  in_.download(receive, in, stream_);  // not on the default stream, which may stand behind a step that waits for ranks
  stream_.synchronize();
}

}  // namespace waybill::cuda
