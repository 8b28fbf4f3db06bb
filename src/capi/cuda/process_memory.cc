// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"

#include <cuda_runtime_api.h>

#include "capi/convert.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::capi {
namespace {

// Before the first CUDA call of a handle, whose text would say less.
void check_gpu(std::int32_t device) {
  int count = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device < count) return;
  (void)cudaGetLastError();
  if (error == cudaSuccess) WB_FAIL(ErrorCode::kInvalidArgument, "device is {}, this process sees {} GPUs; check CUDA_VISIBLE_DEVICES", device, count);
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    WB_FAIL(ErrorCode::kUnsupported, "this machine has no NVIDIA driver (libcuda.so.1 was not found), which the operations on GPUs need; install it");
  }
  WB_FAIL(ErrorCode::kUnsupported,
          "no GPU can be used: {} ({}); the driver supports CUDA {}.{}, this build has CUDA {}.{}; see nvidia-smi and CUDA_VISIBLE_DEVICES",
          cudaGetErrorString(error), cudaGetErrorName(error), driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

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
  if (group == nullptr) {
    check_gpu(device);
    return ranks;
  }
  ranks = read_struct(group, "group");
  WB_CHECK(ranks.size >= 1 && ranks.rank >= 0 && ranks.rank < ranks.size, "group: rank {} of {} is none", ranks.rank, ranks.size);
  WB_CHECK(ranks.device == device, "group.device is {}, device {}", ranks.device, device);
  (void)required(ranks.address, "group.address");
  check_gpu(device);
  return ranks;
}

std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes, bool may_have_nodes) {
  if (group != nullptr) return make_nccl_memory(*group, arena_bytes, may_have_nodes);
  return std::make_unique<OwnMemory>(device, arena_bytes);
}

}  // namespace waybill::capi
