// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "capi/cuda/process_memory.h"
#include "fabric/nccl/nccl_world.h"

namespace waybill::capi {
namespace {

int ranks_per_node(bool may_have_nodes) {
  const char* forced = std::getenv("WAYBILL_RANKS_PER_NODE");
  if (!may_have_nodes) return cuda::kOneNode;
  if (forced == nullptr || *forced == 0) return cuda::kNodesByTopology;
  char* end = nullptr;
  const long ranks = std::strtol(forced, &end, 10);
  WB_CHECK(*end == 0 && ranks >= 1 && ranks <= 1 << 20, "WAYBILL_RANKS_PER_NODE must be a positive whole number, got \"{}\"", forced);
  return static_cast<int>(ranks);
}

class NcclMemory final : public ProcessMemory {
 public:
  NcclMemory(const wb_process_group& group, std::size_t bytes, bool may_have_nodes)
      : world_(cuda::NcclOptions{bytes, std::chrono::milliseconds(60000), ranks_per_node(may_have_nodes)},
               cuda::ProcessRank{group.rank, group.size, group.device, group.address, group.port}) {}
  int size() const override { return world_.size(); }
  int num_nodes() const override { return world_.num_nodes(); }
  cuda::Rail* rail() override { return &world_.rail(); }
  cuda::LocalRanks ranks() const override { return world_.local_ranks(); }
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return world_.window(name, bytes); }
  void everybody_is_ready() override { world_.host_fabric().barrier("MoE layer is there"); }
  std::string first_error() const override { return world_.first_error(); }

 private:
  cuda::NcclWorld world_;
};

}  // namespace

std::unique_ptr<ProcessMemory> make_nccl_memory(const wb_process_group& group, std::size_t arena_bytes, bool may_have_nodes) {
  return std::make_unique<NcclMemory>(group, arena_bytes, may_have_nodes);
}

}  // namespace waybill::capi
