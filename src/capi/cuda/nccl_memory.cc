// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include "capi/cuda/process_memory.h"
#include "fabric/nccl/nccl_world.h"

namespace waybill::capi {
namespace {

// The number that an environment variable holds; none: `otherwise`.
int positive(const char* name, int most, int otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);
  WB_CHECK(*end == 0 && number >= 1 && number <= most, "{} must be a whole number of 1 to {}, got \"{}\"", name, most, text);
  return static_cast<int>(number);
}

int ranks_per_node(bool may_have_nodes) { return may_have_nodes ? positive("WAYBILL_RANKS_PER_NODE", 1 << 20, cuda::kNodesByTopology) : cuda::kOneNode; }

cuda::NcclOptions world_options(std::size_t bytes, bool may_have_nodes) {
  const std::chrono::milliseconds timeout(positive("WAYBILL_GPU_TIMEOUT_MS", 1 << 30, 60000));
  return {bytes, timeout, ranks_per_node(may_have_nodes), std::max(timeout, std::chrono::milliseconds(60000))};
}

class NcclMemory final : public ProcessMemory {
 public:
  NcclMemory(const wb_process_group& group, std::size_t bytes, bool may_have_nodes)
      : world_(world_options(bytes, may_have_nodes), cuda::ProcessRank{group.rank, group.size, group.device, group.address, group.port}) {}
  int size() const override { return world_.size(); }
  int num_nodes() const override { return world_.num_nodes(); }
  cuda::Rail* rail() override { return &world_.rail(); }
  cuda::LocalRanks ranks() const override { return world_.local_ranks(); }
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return world_.window(name, bytes); }
  void everybody_is_ready() override { world_.host_fabric().barrier("MoE layer is there"); }
  std::string first_error() const override { return world_.first_error(); }
  void check(const char* what) const override { world_.check(what); }

 private:
  cuda::NcclWorld world_;
};

}  // namespace

std::unique_ptr<ProcessMemory> make_nccl_memory(const wb_process_group& group, std::size_t arena_bytes, bool may_have_nodes) {
  return std::make_unique<NcclMemory>(group, arena_bytes, may_have_nodes);
}

}  // namespace waybill::capi
