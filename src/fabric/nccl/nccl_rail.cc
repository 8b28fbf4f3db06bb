// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_rail.h"

namespace waybill::cuda {
namespace {

class NcclRail final : public Rail {
 public:
  NcclRail(const ncclComm_t& comm, int rank, int ranks_per_node, int size) : comm_(comm), rank_(rank), per_node_(ranks_per_node), size_(size) {}
  int num_nodes() const override { return size_ / per_node_; }
  int node() const override { return rank_ / per_node_; }
  int ranks_per_node() const override { return per_node_; }
  void exchange(std::span<const RailMessage> messages, cudaStream_t stream) override {
    if (messages.empty()) return;
    if (comm_ == nullptr) WB_FAIL(ErrorCode::kPeerFailed, "rank {} of {}: the group has lost a rank, no bytes go between its nodes any more", rank_, size_);
    const NcclLibrary& nccl = nccl_library();
    WB_TRY_NCCL(nccl.group_start());
    for (const RailMessage& m : messages) {
      WB_ASSERT(m.index == rank_ % per_node_ && m.node >= 0 && m.node < num_nodes() && m.node != node());
      const int peer = m.node * per_node_ + m.index;
      WB_TRY_NCCL(nccl.send(m.send, m.bytes, ncclInt8, peer, comm_, stream));
      WB_TRY_NCCL(nccl.receive(m.receive, m.bytes, ncclInt8, peer, comm_, stream));
    }
    WB_TRY_NCCL(nccl.group_end());
  }

 private:
  const ncclComm_t& comm_;
  int rank_, per_node_, size_;
};

}  // namespace

std::unique_ptr<Rail> make_nccl_rail(const ncclComm_t& comm, int rank, int ranks_per_node, int size) {
  return std::make_unique<NcclRail>(comm, rank, ranks_per_node, size);
}

}  // namespace waybill::cuda
