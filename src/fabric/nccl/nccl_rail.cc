// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_rail.h"

#include <utility>

#include "core/cuda/cuda_error.h"
#include "fabric/nccl/nccl_progress.h"

namespace waybill::cuda {
namespace {

class NcclRail final : public Rail {
 public:
  NcclRail(const NcclLibrary& nccl, const NcclComm& comm, int rank, int ranks_per_node, int size, RailProgress* progress, std::uint32_t* poison,
           RailFailure failed)
      : nccl_(nccl), comm_(comm), rank_(rank), per_node_(ranks_per_node), size_(size), progress_(progress), poison_(poison), failed_(std::move(failed)) {}
  int num_nodes() const override { return size_ / per_node_; }
  int node() const override { return rank_ / per_node_; }
  int ranks_per_node() const override { return per_node_; }
  void exchange(std::span<const RailMessage> messages, cudaStream_t stream) override {
    if (messages.empty()) return;
    const ncclResult_t error = queue(messages, stream);
    if (error != ncclSuccess) failed_(stream, error);
  }

 private:
  ncclResult_t queue(std::span<const RailMessage> messages, cudaStream_t stream) const {
    const NcclComm::Use use = comm_.use();
    const ncclComm_t comm = use.get();
    if (comm == nullptr) return ncclRemoteError;
    if (progress_ != nullptr) launch_nccl_progress(&progress_->begun, stream), check_launch("nccl_progress");
    const ncclResult_t error = in_one_group(nccl_, [&] {
      for (const RailMessage& m : messages) {
        WB_ASSERT(m.index == rank_ % per_node_ && m.node >= 0 && m.node < num_nodes() && m.node != node());
        const int peer = m.node * per_node_ + m.index;
        ncclResult_t queued = nccl_.send(m.send, m.bytes, ncclInt8, peer, comm, stream);
        if (queued == ncclSuccess) queued = nccl_.receive(m.receive, m.bytes, ncclInt8, peer, comm, stream);
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    });
    if (error == ncclSuccess && progress_ != nullptr) {
      launch_nccl_progress(&progress_->ended, stream, &progress_->is_lost, poison_);
      check_launch("nccl_progress");
    }
    return error;
  }

  const NcclLibrary& nccl_;
  const NcclComm& comm_;
  int rank_, per_node_, size_;
  RailProgress* progress_;
  std::uint32_t* poison_;
  RailFailure failed_;
};

}  // namespace

std::unique_ptr<Rail> make_nccl_rail(const NcclLibrary& nccl, const NcclComm& comm, int rank, int ranks_per_node, int size, RailProgress* progress,
                                     std::uint32_t* poison, RailFailure failed) {
  return std::make_unique<NcclRail>(nccl, comm, rank, ranks_per_node, size, progress, poison, std::move(failed));
}

}  // namespace waybill::cuda
