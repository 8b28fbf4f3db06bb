// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_rail.h"

#include <utility>

namespace waybill::cuda {
namespace {

class NcclRail final : public Rail {
 public:
  NcclRail(const NcclLibrary& nccl, const ncclComm_t& comm, int rank, int ranks_per_node, int size, RailFailure failed)
      : nccl_(nccl), comm_(comm), rank_(rank), per_node_(ranks_per_node), size_(size), failed_(std::move(failed)) {}
  int num_nodes() const override { return size_ / per_node_; }
  int node() const override { return rank_ / per_node_; }
  int ranks_per_node() const override { return per_node_; }
  void exchange(std::span<const RailMessage> messages, cudaStream_t stream) override {
    if (messages.empty()) return;
    if (comm_ == nullptr) WB_FAIL(ErrorCode::kPeerFailed, "rank {} of {}: the group has lost a rank, no bytes go between its nodes any more", rank_, size_);
    const ncclResult_t error = in_one_group(nccl_, [&] {
      for (const RailMessage& m : messages) {
        WB_ASSERT(m.index == rank_ % per_node_ && m.node >= 0 && m.node < num_nodes() && m.node != node());
        const int peer = m.node * per_node_ + m.index;
        ncclResult_t queued = nccl_.send(m.send, m.bytes, ncclInt8, peer, comm_, stream);
        if (queued == ncclSuccess) queued = nccl_.receive(m.receive, m.bytes, ncclInt8, peer, comm_, stream);
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    });
    if (error != ncclSuccess) failed_(stream, error);
  }

 private:
  const NcclLibrary& nccl_;
  const ncclComm_t& comm_;
  int rank_, per_node_, size_;
  RailFailure failed_;
};

}  // namespace

std::unique_ptr<Rail> make_nccl_rail(const NcclLibrary& nccl, const ncclComm_t& comm, int rank, int ranks_per_node, int size, RailFailure failed) {
  return std::make_unique<NcclRail>(nccl, comm, rank, ranks_per_node, size, std::move(failed));
}

}  // namespace waybill::cuda
