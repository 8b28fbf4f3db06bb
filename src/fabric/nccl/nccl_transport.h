// SPDX-License-Identifier: Apache-2.0
// Bytes between the host memories of processes over NCCL send and receive: what the caller engine of Fabric stands on. For small messages.
#pragma once

#include <functional>

#include "core/cuda/device_buffer.h"
#include "fabric/nccl/nccl_comm.h"
#include "fabric/nccl/nccl_library.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

// Waits until `stream` has ended, or throws: kTimeout, or kPeerFailed after an error of NCCL (`refused`, or one it learns of; ncclRemoteError where the
// communicator has been taken away). Nothing waits on the stream then.
using AwaitStream = std::function<void(cudaStream_t stream, ncclResult_t refused)>;

// For a communicator that nothing else watches: an error, or more than `timeout`, throws; what waits on the stream goes on waiting.
AwaitStream plain_wait(const NcclLibrary& nccl, const NcclComm& comm, std::chrono::milliseconds timeout);

class NcclTransport final : public FabricTransport {
 public:
  // nccl and comm must outlive it.
  NcclTransport(const NcclLibrary& nccl, const NcclComm& comm, int size, AwaitStream wait);
  // Staged through device memory that grows to the largest call.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) override;

 private:
  ncclResult_t queue(std::span<const std::int64_t> send_bytes, std::span<const std::int64_t> receive_bytes) const;

  const NcclLibrary& nccl_;
  const NcclComm& comm_;
  int size_;
  AwaitStream wait_;
  CudaStream stream_;
  DeviceBuffer out_, in_;
};

}  // namespace waybill::cuda
