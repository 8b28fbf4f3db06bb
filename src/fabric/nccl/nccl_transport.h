// SPDX-License-Identifier: Apache-2.0
// Bytes between the host memories of processes over NCCL send and receive: what the caller engine of Fabric stands on. For small messages.
#pragma once

#include "core/cuda/device_buffer.h"
#include "fabric/nccl/nccl_library.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

class NcclTransport final : public FabricTransport {
 public:
  NcclTransport(ncclComm_t comm, int rank, int size, std::chrono::milliseconds timeout);
  // Staged through device memory that grows to the largest call. A wait that runs out throws kTimeout; an error of NCCL kPeerFailed.
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) override;

 private:
  ncclComm_t comm_;
  int rank_, size_;
  std::chrono::milliseconds timeout_;
  CudaStream stream_;
  DeviceBuffer out_, in_;
};

}  // namespace waybill::cuda
