// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"
#include "fabric/nccl/nccl_world.h"

namespace waybill::capi {
namespace {

class NcclMemory final : public ProcessMemory {
 public:
  NcclMemory(const wb_process_group& group, std::size_t bytes)
      : world_(cuda::NcclOptions{bytes, std::chrono::milliseconds(60000), cuda::kOneNode},
               cuda::ProcessRank{group.rank, group.size, group.device, group.address, group.port}) {}
  int size() const override { return world_.size(); }
  cuda::LocalRanks ranks() const override { return world_.local_ranks(); }
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return world_.window(name, bytes); }
  void everybody_is_ready() override { world_.host_fabric().barrier("MoE layer is there"); }
  std::string first_error() const override { return world_.first_error(); }

 private:
  cuda::NcclWorld world_;
};

}  // namespace

std::unique_ptr<ProcessMemory> make_nccl_memory(const wb_process_group& group, std::size_t arena_bytes) {
  return std::make_unique<NcclMemory>(group, arena_bytes);
}

}  // namespace waybill::capi
