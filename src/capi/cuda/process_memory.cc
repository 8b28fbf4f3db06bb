// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"

#include "capi/convert.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::capi {
namespace {

class OwnMemory final : public ProcessMemory {
 public:
  OwnMemory(int device, std::size_t bytes) : device_(device), group_(1, std::span<const int>(&device, 1), bytes) {}
  int size() const override { return 1; }
  cuda::LocalRanks ranks() const override { return cuda::local_ranks(group_, device_); }
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return group_.window(name, bytes); }
  void everybody_is_ready() override {}
  std::string first_error() const override { return group_.first_error(); }

 private:
  int device_;
  cuda::CudaLocalGroup group_;
};

}  // namespace

wb_process_group checked_group(const wb_process_group* group, std::int32_t device) {
  (void)to_device(WB_CUDA_DEVICE, device, "device", Memory::kAny);
  wb_process_group ranks{};
  ranks.size = 1;
  if (group == nullptr) return ranks;
  ranks = read_struct(group, "group");
  WB_CHECK(ranks.size >= 1 && ranks.rank >= 0 && ranks.rank < ranks.size, "group: rank {} of {} is none", ranks.rank, ranks.size);
  WB_CHECK(ranks.device == device, "group.device is {}, device {}", ranks.device, device);
  (void)required(ranks.address, "group.address");
  return ranks;
}

std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes) {
  if (group != nullptr) return make_nccl_memory(*group, arena_bytes);
  return std::make_unique<OwnMemory>(device, arena_bytes);
}

}  // namespace waybill::capi
