// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"

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

std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes) {
  if (group != nullptr) return make_nccl_memory(*group, arena_bytes);
  return std::make_unique<OwnMemory>(device, arena_bytes);
}

}  // namespace waybill::capi
